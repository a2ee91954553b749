"""Sub-models by width: which units layers share, found by tracing, and the narrow networks that keep some of them."""
