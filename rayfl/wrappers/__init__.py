"""What an experiment puts around its method: the `wrap` list."""
