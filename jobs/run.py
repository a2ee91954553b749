"""The command `rayfl run` as a module, for `ray job submit`: `python -m jobs.run FILE [KEY=VALUE ...]`."""

import sys

from jobs import cli

if __name__ == "__main__":
    cli.main(["run", *sys.argv[1:]], prog_name="rayfl")
