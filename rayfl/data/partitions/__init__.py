"""Who holds what: partitions by name, one a file."""
