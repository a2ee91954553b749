"""The command `rayfl`, and `python -m rayfl`. It uses rayfl's own packages even if a project has such names."""

import sys

from rayfl.own_packages import claim


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130 and one sentence, also while the command line loads."""
    try:
        claim("jobs")
        from jobs.cli import main as command

        command(prog_name="rayfl")
    except KeyboardInterrupt:
        sys.stderr.write("rayfl: interrupted; run it again\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
