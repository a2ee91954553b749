"""What all commands share: the types of their arguments, one sentence for every error, and the child process.

Nothing here loads torch or Ray before a command needs them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from actors.parent_process import leave_sentence, supervised
from jobs.exit_codes import FAILED
from jobs.shipped import experiment_file
from jobs.standard_output import discard_output, reader_has_left
from rayfl.errors import RayflError


class _Place(click.ParamType):
    """An argument that `convert_place` makes of a word. Raise RayflError for a word that it refuses."""

    name = "path"

    def __init__(self, convert_place: Callable[[str], Path | str]) -> None:
        self._convert = convert_place

    # Any: click's own signature.
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        return value if isinstance(value, Path) else self._convert(value)


def _local(word: str) -> Path:
    """A path on this machine. A URL is refused, because a folder called "s3:" would be made of it."""
    if ":/" in word:
        from rayfl.run_directory.object_storage import require_path

        require_path(word)
    return Path(word)


def _folder(word: str) -> Path | str:
    """An absolute path, or the URL of a folder in object storage."""
    if ":/" in word:
        from rayfl.run_directory.object_storage import is_url, require_url

        if is_url(word):
            require_url(word)
            return word
    return _local(word).absolute()


def _run(word: str) -> Path | str:
    """The absolute path or the URL of a run."""
    place = _folder(word)
    if isinstance(place, str):
        from rayfl.run_directory.object_storage import parted

        parted(place)
    return place


EXISTING = _Place(_local)
ABSOLUTE = _Place(lambda word: _local(word).absolute())
RUN_PLACE = _Place(_run)
FOLDER_PLACE = _Place(_folder)
EXPERIMENT = _Place(lambda word: experiment_file(_local(word)))


@contextmanager
def sentences() -> Iterator[None]:
    """End every exception in one sentence: a user's mistake with exit code 2, everything else with 1.

    If nobody reads the output any more, as under `| head`, the command ends without a word.
    """
    try:
        yield
        sys.stdout.flush()
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    # One handler for all commands: nothing but a sentence reaches the user.
    except Exception as error:  # noqa: BLE001
        if isinstance(error, BrokenPipeError) and reader_has_left():
            discard_output()
            sys.exit(FAILED)
        from jobs.errors import described

        sentence, code = described(error)
        leave_sentence(sentence)
        print(f"rayfl: {sentence}", file=sys.stderr)
        sys.exit(code)


class WithSettings(click.Command):
    """A command that takes settings as KEY=VALUE. A setting written as an option gets a sentence that says so."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from rayfl.experiment.experiment import Experiment
            from rayfl.experiment.unknown_keys import places

            option = error.option_name
            key = next(iter(places(option.lstrip("-"), Experiment)), None)
            if key is None:
                raise
            at = next((place for place, word in enumerate(given) if word.partition("=")[0] == option), len(given))
            value = "".join(given[at : at + 1]).partition("=")[2] or "".join(given[at + 1 : at + 2]) or "VALUE"
            raise RayflError(f"there is no option {option}; settings are written KEY=VALUE: {key}={value}") from None


class Commands(click.Group):
    """Commands whose errors end in one sentence. Called by a shell, they run in a child process (parent_process.py)."""

    # Any: click's own signature.
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        supervised(lambda: self.main(*args, **kwargs), FAILED)

    # Any: click's own signature.
    def invoke(self, ctx: click.Context) -> Any:
        with sentences():
            return super().invoke(ctx)
