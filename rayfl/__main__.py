"""The command `rayfl`, and `python -m rayfl`. It uses rayfl's own packages even if a project has such names."""

from rayfl.own_packages import claim


def main() -> None:
    """Run the command line."""
    claim("jobs")
    from jobs.cli import main as command

    command(prog_name="rayfl")


if __name__ == "__main__":
    main()
