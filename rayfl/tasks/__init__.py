"""Tasks by name, one file each: what a network's outputs should be, and how far they are from it."""
