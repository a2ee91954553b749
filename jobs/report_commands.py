"""The commands about runs that are there: report, compare, table, ls, show, prune, pack and note."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from jobs.arguments import ABSOLUTE, PLACE
from jobs.display import Display
from rayfl.errors import RayflError
from rayfl.untyped import Foreign, Value

# Each command imports what it needs, so that `rayfl --help` loads nothing else.


def report_options(
    options: Mapping[str, object], axes: Sequence[str] = ("rows", "columns", "baseline")
) -> dict[str, object]:
    """The options of `COMPARING` and `_PIVOT` that were given, by their names in the table `[report]`.

    axes: those that make a table of `[[report.tables]]`, in which its values are then shown.
    """
    given = {key: value for key, value in options.items() if value not in (None, ())}
    table = {key: given.pop(key) for key in axes if key in given}
    values = {"values": given["values"]} if table and "values" in given else {}
    return {**given, "tables": [table | values]} if table else given


def taking(*options: Callable[[Foreign], Foreign]) -> Callable[[Foreign], Foreign]:
    """Add options to a command."""
    return lambda command: functools.reduce(lambda taker, option: option(taker), options, command)


_RANKING = (
    click.option(
        "--metric",
        help="The metric to compare by, such as own/accuracy; default: the first, own/... if a method is personal.",
    ),
    click.option(
        "--last", type=int, help="Number of last evaluations whose mean is the smoothed final value; default: 3."
    ),
    click.option("--best-over", multiple=True, metavar="KEY", help="Show only the best value of a setting."),
    click.option(
        "--values",
        metavar="NAME,...",
        help="Numbers to show, such as own/accuracy:best,comm/busiest_megabytes,rounds@0.8.",
    ),
)
COMPARING = (
    *_RANKING,
    click.option(
        "--target",
        type=float,
        multiple=True,
        help="Value, such as 0.8; the rounds and megabytes to reach it are compared.",
    ),
)
_PIVOT = (
    click.option("--rows", metavar="KEY", help="Swept setting of a table's rows, such as method.lr, case or label."),
    click.option("--columns", metavar="KEY", help="Swept setting of its columns; default: a column per value."),
    click.option("--baseline", metavar="ITEM", help="Row or column with which the others are compared, seed by seed."),
)


@click.command()
@click.argument("directories", nargs=-1, required=True, type=PLACE)
@click.option(
    "--output", type=ABSOLUTE, help="The page; default: report.html, or comparison.html, in the one directory, or here."
)
@taking(*COMPARING, *_PIVOT)
@click.option("--figures", type=ABSOLUTE, help="Folder for the figures as SVG and PDF, and tables as CSV and LaTeX.")
@click.option("--mask-clients", multiple=True, type=int, metavar="N", help="Client whose mask is drawn.")
@click.option("--overwrite", is_flag=True, help="Replace the file even if rayfl did not write it.")
@click.option("--json", "as_json", is_flag=True, help="Print the runs' numbers as JSON instead of writing a page.")
def report(
    directories: Sequence[Path | str],
    output: Path | None,
    figures: Path | None,
    overwrite: bool,
    as_json: bool,
    **options: Value,
) -> None:
    """Write a page about one run, or one that compares several. The directory of a sweep means all its runs.

    DIRECTORIES may be URLs of runs, such as s3://bucket/runs/NAME; the page is written on this machine.
    """
    with Display("loading") as display:
        from jobs import reporting

        if as_json:
            reporting.print_json(directories, display)
        else:
            reporting.write_page(directories, output, figures, report_options(options), overwrite, display)


@click.command()
@click.argument("directories", nargs=-1, required=True, type=PLACE)
@taking(*COMPARING)
def compare(directories: Sequence[Path | str], **options: Value) -> None:
    """Show runs side by side, the best first: the tables of `rayfl report` without its page."""
    with Display("loading") as display:
        from jobs import reporting

        reporting.compare(directories, report_options(options), display)


@click.command()
@click.argument("directories", nargs=-1, required=True, type=PLACE)
@taking(*_RANKING, *_PIVOT)
@click.option(
    "--format", "written", type=click.Choice(["text", "csv", "md", "latex"]), help="Default: as --output ends."
)
@click.option("--output", type=ABSOLUTE, help="The file; default: the table is printed.")
@click.option("--overwrite", is_flag=True, help="Replace the file if there is one.")
def table(
    directories: Sequence[Path | str], written: str | None, output: Path | None, overwrite: bool, **options: Value
) -> None:
    """Show numbers by the items of swept settings: means over seeds, and paired differences to a baseline.

    By default the tables of [report], or those that fit the sweep.
    """
    with Display("loading") as display:
        from jobs import reporting

        axes = ("rows", "columns", "baseline", "values")
        reporting.print_tables(directories, written, output, report_options(options, axes), overwrite, display)


@click.command()
@click.argument("folders", nargs=-1, type=ABSOLUTE)
@click.option(
    "--where",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only runs with this value: state=finished, tag=WORD, method=NAME.",
)
def ls(folders: Sequence[Path], where: Sequence[str]) -> None:
    """List the runs in FOLDERS, by default in runs/, the latest first: state, rounds, metric, time, tags, note."""
    if wrong := [word for word in where if "=" not in word]:
        raise RayflError(f"--where {wrong[0]}: write KEY=VALUE, as in state=finished, tag=paper or method.lr=0.1")
    with Display("loading") as display:
        from jobs import reporting

        for folder in folders or [_runs()]:
            reporting.list_runs(folder, dict(word.split("=", 1) for word in where), display)


def _runs() -> Path:
    return Path("runs").absolute()


@click.command()
@click.argument("folders", nargs=-1, type=ABSOLUTE)
@click.option("--dry-run", is_flag=True, help="Print what would be freed, and remove nothing.")
def prune(folders: Sequence[Path], dry_run: bool) -> None:
    """Remove the checkpoints of the finished runs in FOLDERS, by default in runs/; results and models stay.

    Adding rounds to such a run begins with its first round again.
    """
    from jobs import keeping

    keeping.prune(folders or [_runs()], dry_run)


@click.command()
@click.argument("directories", nargs=-1, required=True, type=ABSOLUTE)
@click.option("--output", type=ABSOLUTE, help="The file; default: NAME.tar.gz here.")
@click.option("--overwrite", is_flag=True, help="Replace the file if there is one.")
def pack(directories: Sequence[Path], output: Path | None, overwrite: bool) -> None:
    """Pack runs or sweeps to share them: one .tar.gz file without checkpoints, and without paths of your home."""
    from jobs import keeping

    keeping.pack(directories, output, overwrite)


@click.command()
@click.argument("directory", metavar="RUN", type=ABSOLUTE)
@click.argument("text", required=False)
@click.option("--tag", multiple=True, metavar="WORD", help="Add a tag.")
@click.option("--untag", multiple=True, metavar="WORD", help="Remove a tag.")
def note(directory: Path, text: str | None, tag: Sequence[str], untag: Sequence[str]) -> None:
    """Give a run a note (TEXT) and tags, which `rayfl ls` shows and finds."""
    from jobs import keeping

    keeping.note(directory, text, tag, untag)


@click.command()
@click.argument("location", metavar="RUN", type=PLACE)
def show(location: Path | str) -> None:
    """Show a run's experiment, platform and results. RUN is its directory or URL."""
    with Display("loading") as display:
        from jobs import reporting

        reporting.show(location, display)


COMMANDS = (report, compare, table, ls, show, prune, pack, note)
