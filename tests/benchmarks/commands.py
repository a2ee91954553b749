"""Benchmarks, as a user types them."""

from click.testing import CliRunner, Result

from benchmarks.__main__ import main


def benchmark(*arguments: object) -> Result:
    """`python -m benchmarks ARGUMENTS`, in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
