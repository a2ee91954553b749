"""The types and options of the commands' arguments, the class of commands that take settings, and the commands about
runs that are there: report, compare, table, ls, show, prune, pack and note.

Nothing here loads torch or Ray before a command needs them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from jobs.display import Display
from jobs.shipped_experiments import experiment_file, names
from rayfl.errors import RayflError
from rayfl.untyped import Foreign


class _Place(click.ParamType):
    """The type of an argument that `convert_place` converts; it raises RayflError for a wrong word."""

    name = "path"

    def __init__(self, convert_place: Callable[[str], Path | str], names: Callable[[], list[str]] = list) -> None:
        self._convert = convert_place
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # bash drops what comes before the request for files.
        return [CompletionItem(incomplete, type="file"), *map(CompletionItem, starting(self._names(), incomplete))]

    def convert(self, value: Foreign, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        return value if isinstance(value, Path) else self._convert(value)


def _local(word: str) -> Path:
    """A path on this machine. Raise RayflError for a URL, for which a folder called "s3:" would be made."""
    if ":" in word:
        from rayfl.run_directory.object_storage import require_path

        require_path(word)
    return Path(word)


def _place(word: str) -> Path | str:
    """An absolute path, or the URL of a run or of a folder in object storage."""
    if ":" in word:
        from rayfl.run_directory.object_storage import is_url

        if is_url(word):
            return word
    return _local(word).absolute()


ABSOLUTE = _Place(lambda word: _local(word).absolute())
PLACE = _Place(_place)
EXPERIMENT = _Place(lambda word: experiment_file(_local(word)), names)


def names_in(table: str) -> list[str]:
    """The names that an experiment's `table` can have: of methods, of models, ..."""
    from rayfl.choices.kinds import known
    from rayfl.experiment.experiment import LISTED

    return [*known(LISTED[table])] if table in LISTED else []


def _complete_setting(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete KEY=NAME, where KEY is a table such as method. bash gives KEY, "=" and NAME as three words."""
    last = next((word for word in reversed(ctx.params["overrides"]) if word != "="), "=")
    if "=" not in (last + incomplete):
        return starting(names_in(last), incomplete)
    key, _, start = incomplete.partition("=")
    return [f"{key}={name}" for name in starting(names_in(key), start)]


def starting(names: Iterable[str], start: str) -> list[str]:
    """The names that begin with `start`."""
    return [name for name in names if name.startswith(start)]


SETTINGS = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_complete_setting)


class WithSettings(click.Command):
    """A command that takes settings as KEY=VALUE. If a setting is given as an option, the error shows its KEY=VALUE."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from rayfl.experiment.experiment import CHOSEN, Experiment
            from rayfl.experiment.unknown_keys import keys_meant_by

            option = error.option_name
            # --lr=0.1, or --lr 0.1
            value = re.search(rf"(?:^|\0){re.escape(option)}[=\0]([^\0]+)", "\0".join(words))
            word = value[1] if value else "VALUE"
            if (
                option == "--output"
                or (key := next(iter(keys_meant_by(option.lstrip("-"), Experiment, CHOSEN)), None)) is None
            ):
                raise
            raise RayflError(f"there is no option {option}; settings are written KEY=VALUE: {key}={word}") from None


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
            click.Option(["--mask-clients"], multiple=True, type=int, metavar="N", help="Client whose mask is drawn."),
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
