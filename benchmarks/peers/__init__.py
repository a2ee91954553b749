"""The work of the benchmark `rounds` in other programs: a bare PyTorch loop, Flower, pfl-research, BlazeFL.

Each module is a program, which any Python runs that has the package it needs. The modules import each other but nothing
else of rayfl: the Python need not have rayfl, and a bare loop must not have rayfl's settings. All programs train two
clients at a time, with one thread each.
"""
