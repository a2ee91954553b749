"""Benchmarks of rayfl, which run from a checkout: `python -m benchmarks NAME`; docs/benchmarks.md has results."""
