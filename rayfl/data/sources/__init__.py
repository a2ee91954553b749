"""Datasets by name, one a file."""
