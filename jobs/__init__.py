"""Entry points: parse, build, call, print. Importing them settles the process before torch is loaded."""

from rayfl.process import settle

settle()
