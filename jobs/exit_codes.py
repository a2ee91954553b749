"""The exit codes of the commands."""

FAILED = 1
"""An error of a client, Ray, the cluster or the disk ended a run, or some runs of a sweep failed."""
MISTAKE = 2
"""The command refused a value of the user."""
INTERRUPTED = 130
"""A signal ended the run: the shells' code for a command that SIGINT ended."""
