"""Trackers: TensorBoard and Weights & Biases, one small adapter each. Nothing imports a tracker's package
before a run asks for it."""
