"""The commands about runs that are there: report, compare, table, ls, show, prune, pack and note."""

from collections.abc import Sequence
from importlib import import_module

import click

from jobs.arguments import ABSOLUTE, PLACE
from jobs.display import Display
from rayfl.untyped import Foreign


class Later(click.Command):
    """A command that calls the function of its name in jobs/reporting.py with its parameters by their names.

    The file is imported only then: `rayfl --help` loads nothing else.
    """

    def __init__(self, name: str, params: Sequence[click.Parameter], text: str) -> None:
        super().__init__(name, params=[*params], help=text)

    def invoke(self, ctx: click.Context) -> Foreign:
        with Display("loading"):
            reporting = import_module("jobs.reporting")
        return getattr(reporting, str(self.name))(**ctx.params)


_DIRECTORIES = click.Argument(["directories"], nargs=-1, required=True, type=PLACE)
_FOLDERS = click.Argument(["folders"], nargs=-1, type=ABSOLUTE)
_REPLACE = click.Option(["--overwrite"], is_flag=True, help="Replace the file if there is one.")
_RANKING = (
    click.Option(
        ["--metric"],
        help="The metric to compare by, such as own/accuracy; default: the first, own/... if a method is personal.",
    ),
    click.Option(
        ["--last"], type=int, help="Number of last evaluations whose mean is the smoothed final value; default: 3."
    ),
    click.Option(["--best-over"], multiple=True, metavar="KEY", help="Show only the best value of a setting."),
    click.Option(
        ["--values"],
        metavar="NAME,...",
        help="Numbers to show, such as own/accuracy:best,comm/busiest_megabytes,rounds@0.8.",
    ),
)
COMPARING = (
    *_RANKING,
    click.Option(
        ["--target"],
        type=float,
        multiple=True,
        help="Value, such as 0.8; the rounds and megabytes to reach it are compared.",
    ),
)
"""The options of commands that compare runs."""
_PIVOT = (
    click.Option(["--rows"], metavar="KEY", help="Swept setting of a table's rows, such as method.lr, case or label."),
    click.Option(["--columns"], metavar="KEY", help="Swept setting of its columns; default: a column per value."),
    click.Option(
        ["--baseline"], metavar="ITEM", help="Row or column with which the others are compared, seed by seed."
    ),
)

COMMANDS = (
    Later(
        "report",
        [
            _DIRECTORIES,
            click.Option(
                ["--output"],
                type=ABSOLUTE,
                help="The page; default: report.html, or comparison.html, in the one directory, or here.",
            ),
            *COMPARING,
            *_PIVOT,
            click.Option(
                ["--figures"], type=ABSOLUTE, help="Folder for the figures as SVG and PDF, and tables as CSV and LaTeX."
            ),
            click.Option(["--overwrite"], is_flag=True, help="Replace the file even if rayfl did not write it."),
            click.Option(
                ["--json", "as_json"], is_flag=True, help="Print the runs' numbers as JSON instead of writing a page."
            ),
        ],
        "Write a page about one run, or one that compares several. The directory of a sweep means all its runs.\n\n"
        "DIRECTORIES may be URLs of runs, such as s3://bucket/runs/NAME; the page is written on this machine.",
    ),
    Later(
        "compare",
        [_DIRECTORIES, *COMPARING],
        "Show runs side by side, the best first: the tables of `rayfl report` without its page.",
    ),
    Later(
        "table",
        [
            _DIRECTORIES,
            *_RANKING,
            *_PIVOT,
            click.Option(
                ["--format", "written"],
                type=click.Choice(["text", "csv", "md", "latex"]),
                help="Default: as --output ends.",
            ),
            click.Option(["--output"], type=ABSOLUTE, help="The file; default: the table is printed."),
            _REPLACE,
        ],
        "Show numbers by the items of swept settings: means over seeds, and paired differences to a baseline.\n\n"
        "By default the tables of [report], or those that fit the sweep.",
    ),
    Later(
        "ls",
        [
            _FOLDERS,
            click.Option(
                ["--where"],
                multiple=True,
                metavar="KEY=VALUE",
                help="Only runs with this value: state=finished, tag=WORD, method=NAME.",
            ),
        ],
        "List the runs in FOLDERS, by default in runs/, the latest first: state, rounds, metric, time, tags, note.",
    ),
    Later(
        "show",
        [click.Argument(["location"], metavar="RUN", type=PLACE)],
        "Show a run's experiment, platform and results. RUN is its directory or URL.",
    ),
    Later(
        "prune",
        [
            _FOLDERS,
            click.Option(["--dry-run"], is_flag=True, help="Print what would be freed, and remove nothing."),
        ],
        "Remove the checkpoints of the finished runs in FOLDERS, by default in runs/; results and models stay.\n\n"
        "Adding rounds to such a run begins with its first round again.",
    ),
    Later(
        "pack",
        [
            click.Argument(["directories"], nargs=-1, required=True, type=ABSOLUTE),
            click.Option(["--output"], type=ABSOLUTE, help="The file; default: NAME.tar.gz here."),
            _REPLACE,
        ],
        "Pack runs or sweeps to share them: one .tar.gz file without checkpoints, and without paths of your home.",
    ),
    Later(
        "note",
        [
            click.Argument(["directory"], metavar="RUN", type=ABSOLUTE),
            click.Argument(["text"], required=False),
            click.Option(["--tag", "tags"], multiple=True, metavar="WORD", help="Add a tag."),
            click.Option(["--untag", "untagged"], multiple=True, metavar="WORD", help="Remove a tag."),
        ],
        "Give a run a note (TEXT) and tags, which `rayfl ls` shows and finds.",
    ),
)
