"""rayfl's commands, as a user types them."""

from click.testing import CliRunner, Result

from jobs.cli import main


def rayfl(*arguments: object) -> Result:
    """`rayfl ARGUMENTS`, in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result: Result, *words: str) -> None:
    """Exit code 2 and one sentence with these words, and nothing else."""
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith("rayfl: ")
    for word in words:
        assert word in result.stderr
