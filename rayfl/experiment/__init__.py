"""Experiment: the whole description of a run, read from TOML, validated once, and prepared."""
