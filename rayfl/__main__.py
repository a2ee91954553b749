"""The command `rayfl`, and `python -m rayfl`: it finds rayfl's own packages whatever a project's folders are called."""

from rayfl.own_packages import claim


def main() -> None:
    """Run the command line."""
    claim("jobs")
    from jobs.cli import main as command

    command(prog_name="rayfl")


if __name__ == "__main__":
    main()
