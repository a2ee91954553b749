"""Methods whose clients train narrower models, as wide as their capacity allows."""
