"""The command `rayfl run` as a module, for `ray job submit`: `python -m jobs.run FILE [KEY=VALUE ...]`."""

from actors.parent_process import supervised
from jobs.cli import run
from jobs.failures import FAILED, sentences


def main() -> None:
    """Run the command."""
    with sentences():
        run()


if __name__ == "__main__":
    supervised(main, FAILED)
