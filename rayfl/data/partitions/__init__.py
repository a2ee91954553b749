"""Partition schemes by name, one or a few a file."""
