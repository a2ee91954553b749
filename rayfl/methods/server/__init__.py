"""One global model: clients train it, and a server combines what they send."""
