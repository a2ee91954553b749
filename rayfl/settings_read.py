"""The settings that other people's code has read in this process, so that a run can refuse one that nothing reads.

Our own classes are not watched: the contract tests prove that they read all their settings, or declare them in
`Settings.unused`.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType

from pydantic import BaseModel

from rayfl.errors import UnusedSetting

OURS = ("rayfl", "actors", "jobs")
"""Our own packages. They read all settings, to write them down for example, so their reading does not count."""
_ALL_AT_ONCE = ("__dict__", "model_dump")

_read: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class ThirdPartySetting:
    """A setting that an experiment gives to a third-party class.

    `id`: the class of its settings, and its name. `taker`: the class that it is for, with its file.
    """

    table: str
    id: tuple[str, str]
    value: str
    taker: str


def class_id(kind: type) -> str:
    """The name of a class of settings, which is the same in all processes."""
    return f"{kind.__module__}.{kind.__qualname__}"


def read_here() -> frozenset[tuple[str, str]]:
    """What code in this process has read, as `ThirdPartySetting.id` has it."""
    return frozenset(_read)


def is_ours(kind: type) -> bool:
    """Whether a class is of one of our packages."""
    return kind.__module__.partition(".")[0] in OURS


def watch(kind: type[BaseModel]) -> None:
    """Note which settings of a third-party class are read from now on; a class of ours is left as it is."""
    if is_ours(kind) or "__getattribute__" in vars(kind):
        return
    fields = kind.model_fields
    known = class_id(kind)

    def read(self: BaseModel, name: str) -> object:
        if (name in fields or name in _ALL_AT_ONCE) and _reader(sys._getframe(1)) not in OURS:
            _read.update((known, field) for field in ([name] if name in fields else fields))
        return object.__getattribute__(self, name)

    kind.__getattribute__ = read


def _reader(frame: FrameType | None) -> str:
    """The package of the code that reads; pydantic's own frames are skipped."""
    while frame is not None and (package := frame.f_globals["__name__"].partition(".")[0]) == "pydantic":
        frame = frame.f_back
    return "" if frame is None else package


def require_read(settings: Iterable[ThirdPartySetting], read: frozenset[tuple[str, str]], round_number: int) -> None:
    """Raise UnusedSetting for the first of the settings that is not among those that code has `read` by now."""
    for setting in settings:
        if setting.id not in read:
            raise UnusedSetting(
                f"={setting.value} does nothing: no code of {setting.taker} has read it by the end of round "
                f"{round_number}; remove it and run again, or, if only later rounds need it, read it in __init__",
                (setting.table, setting.id[1]),
            )
