"""The types of the commands' arguments, the class of commands that take settings, and what options of reports mean.

Nothing here loads torch or Ray before a command needs them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

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
    from rayfl.run_directory.object_storage import require_path

    require_path(word)
    return Path(word)


def _place(word: str) -> Path | str:
    """An absolute path, or the URL of a run or of a folder in object storage."""
    from rayfl.run_directory.object_storage import is_url

    return word if is_url(word) else Path(word).absolute()


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
            keys = keys_meant_by(option.lstrip("-"), Experiment, CHOSEN)
            if option == "--output" or not keys:
                raise
            meant = f"{keys[0]}={value[1] if value else 'VALUE'}"
            raise RayflError(f"there is no option {option}; settings are written KEY=VALUE: {meant}") from None


def report_options(
    options: Mapping[str, object], axes: Sequence[str] = ("rows", "columns", "baseline")
) -> dict[str, object]:
    """The options of reports that were given, by their names in the table `[report]`.

    axes: those that make a table of `[[report.tables]]`, in which its values are then shown.
    """
    given = {key: value for key, value in options.items() if value not in (None, ())}
    table = {key: given.pop(key) for key in axes if key in given}
    values = {"values": given["values"]} if table and "values" in given else {}
    return {**given, "tables": [table | values]} if table else given
