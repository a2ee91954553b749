"""Schedules: when clients begin, and when the server updates its model."""
