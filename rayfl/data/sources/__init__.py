"""Datasets by name, one or a few a file."""
