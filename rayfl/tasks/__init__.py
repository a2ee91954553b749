"""Tasks by name: what a network's outputs should be, and how far they are from it."""
