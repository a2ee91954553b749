"""rayfl's commands, as a user types them."""

from click.testing import CliRunner, Result

from jobs.cli import main


def rayfl(*arguments: object) -> Result:
    """`rayfl ARGUMENTS`, in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
