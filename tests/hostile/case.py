"""A wrong input as data: the files around a command, the command, and what is expected of it.

A new case is a line in a list of `tests/hostile/kinds/`. Every case has a directory of its own, which is the command's
current directory; `demo.toml` (a small experiment without Ray) is always there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs.failures import FAILED, MISTAKE
from rayfl import toml

Content = str | bytes | Callable[[Path], object]
"""What becomes of a path: text or bytes are written there, a function makes it or damages what is there."""

DEMO: dict[str, Any] = {
    "name": "demo",
    "rounds": 2,
    "data": {"name": "digits"},
    "partition": {"name": "iid"},
    "clients": {"count": 4},
    "model": {"name": "logistic"},
    "method": {"name": "fedavg", "lr": 0.1},
    "output": {"report": False},
    "runtime": {"executor": "inline"},
}


@dataclass(frozen=True)
class Case:
    """One wrong input, or a valid one beside it (`code` 0).

    `names`: words that the sentence must have, such as the key or the file. `start`: a run in `run/` that finished or
    was cut before its end, or a sweep of one run. `files` are made, in order, on top of that. `may_write`: paths that
    the command may change or make; by default nothing for what is refused. `same_bits`: the run in `run/` must end
    with the records of the undisturbed run.
    """

    kind: str
    name: str
    command: Sequence[object]
    names: Sequence[str] = ()
    files: Mapping[str, Content] = field(default_factory=dict)
    start: Literal["", "cut", "done", "sweep"] = ""
    code: int = MISTAKE
    may_write: Sequence[str] = ()
    same_bits: bool = False
    in_suite: bool = False
    in_process: bool = False
    """`in_suite`: one of those that run in every test run; `in_process`: also run as a process of its own."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"

    @property
    def argv(self) -> list[str]:
        return [str(word) for word in self.command]

    @property
    def is_refused(self) -> bool:
        return self.code == MISTAKE

    @property
    def fails(self) -> bool:
        return self.code in (MISTAKE, FAILED)


# Any: values of an experiment, right or wrong.
def experiment(**changes: Any) -> str:
    """The text of the demo experiment with tables replaced, or left out where they are None."""
    return toml.dumps({key: value for key, value in {**DEMO, **changes}.items() if value is not None})
