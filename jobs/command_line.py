"""What all commands share: their arguments, one sentence for every mistake, and the process in which they run.

Nothing here loads torch or Ray before a command needs them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from actors.supervisor import supervised
from jobs.exit_codes import FAILED
from jobs.standard_output import discard_output, reader_has_left


class _Local(click.Path):
    """A path on this machine: a URL is refused, of which a folder called "s3:" would be made."""

    # Any: click's own signature.
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path as it was given."""
        path = os.fsdecode(super().convert(value, param, ctx))
        if ":/" in path:
            with sentences():
                from rayfl.run_directory.object_storage import require_path

                require_path(path)
        return Path(path)


class _Absolute(_Local):
    """A path that is printed, and written down, as an absolute one."""

    # Any: click's own signature.
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path from the current directory."""
        return super().convert(value, param, ctx).absolute()


class _PlaceOrUrl(_Absolute):
    """A directory, or the URL of one in object storage: of a run, or of any folder."""

    # Any: click's own signature.
    def __init__(self, of_run: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._of_run = of_run

    # Any: click's own signature.
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """The absolute path, or the URL as text."""
        if isinstance(value, str) and ":/" in value:
            with sentences():
                from rayfl.run_directory.object_storage import is_url, parted, require_url

                if is_url(value):
                    if self._of_run:
                        parted(value)
                    require_url(value)
                    return value
        return super().convert(value, param, ctx)


class _ExperimentFile(_Local):
    """The path of an experiment's file, or the name of one that comes with rayfl."""

    # Any: click's own signature.
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path of the file."""
        from jobs.shipped import experiment_file
        from rayfl.errors import RayflError

        try:
            return experiment_file(super().convert(value, param, ctx))
        except RayflError as error:
            refuse(error)


EXISTING = _Local(path_type=Path)
ABSOLUTE = _Absolute(path_type=Path)
RUN_PLACE = _PlaceOrUrl(of_run=True, path_type=Path)
FOLDER_PLACE = _PlaceOrUrl(of_run=False, path_type=Path)
EXPERIMENT = _ExperimentFile(path_type=Path)


@contextmanager
def sentences() -> Iterator[None]:
    """Every exception ends in one sentence: a user's mistake with exit code 2, a failure of anything else with 1.

    Where nobody reads the output any more, as under `| head`, the command ends without a word.
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
        print(f"rayfl: {sentence}", file=sys.stderr)
        sys.exit(code)


def refuse(error: Exception) -> NoReturn:
    """End the command with an exception's sentence."""
    with sentences():
        raise error from None
    raise AssertionError("the sentence has ended the command")


class WithSettings(click.Command):
    """A command that takes settings as KEY=VALUE, and names the setting where it is given one as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from rayfl.errors import RayflError
            from rayfl.experiment.experiment import Experiment
            from rayfl.experiment.unknown_keys import places

            option = error.option_name
            key = next(iter(places(option.lstrip("-"), Experiment)), None)
            if key is None:
                raise
            at = next((place for place, word in enumerate(given) if word.partition("=")[0] == option), len(given))
            value = "".join(given[at : at + 1]).partition("=")[2] or "".join(given[at + 1 : at + 2]) or "VALUE"
            refuse(RayflError(f"there is no option {option}; settings are written KEY=VALUE: {key}={value}"))


class Supervised(click.Group):
    """Commands which, called by a shell, run in a child process: actors/supervisor.py."""

    # Any: click's own signature.
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        supervised(lambda: self.main(*args, **kwargs), FAILED)
