"""Low-rank adapters: clients train factors B A of their own rank, and the server combines them."""
