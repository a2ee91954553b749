"""The clients: their traits, sampling, availability, and distributions of traits."""
