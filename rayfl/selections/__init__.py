"""Selections: which clients the server selects in a round."""
