"""Graphs of peers that exchange messages: their kinds, files and statistics."""
