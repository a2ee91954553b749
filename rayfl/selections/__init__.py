"""Selections: which clients the server asks in a round."""
