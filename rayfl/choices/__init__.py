"""Choosing an object by name, table, file or entry point, in experiments and from plug-ins."""
