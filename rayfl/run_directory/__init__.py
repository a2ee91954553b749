"""A run on disk: records, checkpoints, models, and the loop that writes them."""
