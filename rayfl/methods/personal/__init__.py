"""A model for each client, or for each cluster of clients."""
