"""Metrics by name, one file each (related ones share one): sums of a model's outputs, and the values made of them."""
