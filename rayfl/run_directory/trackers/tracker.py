"""What trackers get to know about a run, and what they need of this machine."""

import importlib.util
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rayfl.errors import RayflError
from rayfl.run_directory.disk import RunFiles
from rayfl.settings import dotted

TrackerName = Literal["tensorboard", "wandb"]

_WANDB = "wandb/(offline-)?run-[0-9_]+-[0-9a-f]{8}(-[0-9]+)?"
PART = RunFiles(
    (
        r"tensorboard/events\.out\.tfevents\.[^/]*",
        r"wandb/debug[a-z-]*\.log",
        rf"{_WANDB}/run-[0-9a-f]{{8}}\.wandb(\.synced)?",
        rf"{_WANDB}/logs/debug[a-z-]*\.log",
        rf"{_WANDB}/files/.+",
    ),
    {
        "`tensorboard/`, `wandb/`": "the rounds' values for the trackers in `output.track` "
        "([Follow runs](../how-to/trackers.md)), by default TensorBoard: `tensorboard --logdir runs`",
    },
)


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it.

    experiment: its resolved table; text: the same as a TOML file. A tracker that writes locally writes into
    `directory`.
    """

    directory: Path
    # Any: settings of any type.
    experiment: Mapping[str, Any]
    text: str

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """The settings by dotted keys, lists as JSON, without those that are None."""
        return {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in dotted(self.experiment).items()
            if value is not None
        }

    @property
    def markdown(self) -> str:
        """The experiment's file as text that a tracker formats."""
        return f"```toml\n{self.text}```\n"


class Tracker(Protocol):
    """One run in a tracker. Any method may raise any error.

    A tracker begins with the run and the number of rounds on record; if that is above 0, the run is resumed.
    """

    def round(self, round_number: int, values: Mapping[str, float]) -> None:
        """Log the values of a round, with the round as the step."""

    def model(self, path: Path) -> None:
        """Log a final model and `inputs.json` beside it, as an artifact if the tracker has artifacts."""

    def close(self, finished: bool) -> None:
        """End the run, or this process's part of it: an unfinished run can be resumed."""


def require_installed(names: Collection[str]) -> None:
    """Raise RayflError, which names the extra to install, for a tracker whose package is not installed."""
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise RayflError(
            " names 'wandb', whose package is not installed: pip install 'rayfl[wandb]', or leave it out",
            ("output", "track"),
        )


def environment(names: Collection[str]) -> dict[str, str]:
    """The environment variables of this process that these trackers read."""
    return {key: value for key, value in os.environ.items() if "wandb" in names and key.startswith("WANDB_")}
