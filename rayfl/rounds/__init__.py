"""The rounds of an experiment over an `Executor`: who works, in which order messages are added, what is recorded."""
