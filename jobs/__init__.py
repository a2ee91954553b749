"""Entry points: parse, build, call, print. Importing them settles the process before torch is loaded."""

from rayfl.determinism.process import prepare_process

prepare_process()
