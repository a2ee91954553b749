"""The work of the benchmark `rounds` in other programs: a bare PyTorch loop, Flower, pfl-research, BlazeFL.

Each module is a program of its own, run by any Python that has the package it needs. None of them imports anything of
rayfl's but the others in this folder: that Python need not have it, and a bare loop shall not have its settings. All of
them train two clients at a time, with one thread each.
"""
