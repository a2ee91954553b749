"""The command `rayfl run` as a module, for `ray job submit`: `python -m jobs.run FILE [KEY=VALUE ...]`."""

from jobs.cli import run

if __name__ == "__main__":
    run()
