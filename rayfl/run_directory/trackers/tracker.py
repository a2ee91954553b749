"""What trackers get to know about a run, and how a tracker is found by its name."""

import importlib.util
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from rayfl.errors import RayflError
from rayfl.run_directory.description import TOML, read_experiment
from rayfl.run_directory.disk import Part
from rayfl.settings import dotted

TrackerName = Literal["tensorboard", "wandb"]

_ADAPTERS: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("rayfl.run_directory.trackers.tensorboard_events", "TensorBoard"),
    "wandb": ("rayfl.run_directory.trackers.wandb_run", "WandbRun"),
}

MOST_VARIABLES = 4_000
"""Bytes of the variables of trackers. Ray puts arguments of calls into its object store from 8 kB on."""
_WANDB = "wandb/(offline-)?run-[0-9_]+-[0-9a-f]{8}(-[0-9]+)?"
PART = Part(
    (
        # Of earlier versions.
        r"trackers\.json",
        r"tensorboard/events\.out\.tfevents\..*",
        r"wandb/debug[a-z-]*\.log",
        rf"{_WANDB}/run-[0-9a-f]{{8}}\.wandb(\.synced)?",
        rf"{_WANDB}/logs/debug[a-z-]*\.log",
        rf"{_WANDB}/files/.+",
        rf"{_WANDB}/tmp/.+/",
    ),
    {
        "`tensorboard/`, `wandb/`": "the same for the trackers in `output.track` "
        "([Follow runs](../how-to/trackers.md)), by default `tensorboard --logdir runs`",
    },
)


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it.

    project: the name of its experiment; group: the sweep that it belongs to; tags: the user's own; experiment: its
    resolved table; text: the same as a TOML file. A tracker that writes locally writes into `directory`.
    """

    directory: Path
    project: str
    group: str | None
    tags: Sequence[str]
    # Any: settings of any type.
    experiment: Mapping[str, Any]
    text: str

    @classmethod
    def read(cls, directory: Path) -> "TrackedRun":
        """The run in a directory. Raise RayflError or OSError if its experiment cannot be read."""
        experiment = read_experiment(directory)
        output = experiment.get("output")
        settings = output if isinstance(output, Mapping) else {}
        return cls(
            directory=directory,
            project=str(experiment.get("name", directory.name)),
            group=settings.get("group"),
            tags=settings.get("tags") or (),
            experiment=experiment,
            text=(directory / TOML).read_text(encoding="utf-8"),
        )

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """The settings by dotted keys, lists as JSON, without those that are None."""
        plain = (bool, int, float, str)
        found = dotted(self.experiment)
        return {
            key: value if isinstance(value, plain) else json.dumps(value)
            for key, value in found.items()
            if value is not None
        }

    def chosen(self, *tables: str) -> dict[str, str]:
        """What the experiment has chosen by name in these tables, such as its method."""
        found = ((table, self.experiment.get(table)) for table in tables)
        return {table: str(value["name"]) for table, value in found if isinstance(value, Mapping) and "name" in value}

    @property
    def markdown(self) -> str:
        """The experiment's file as text that a tracker formats."""
        return f"```toml\n{self.text}```\n"


class Tracker(Protocol):
    """One run in a tracker. Any method may raise any error.

    Arguments: the run, and the number of rounds on record; if it is above 0, the run is resumed.
    """

    def __init__(self, run: TrackedRun, num_recorded: int) -> None: ...

    def round(self, round: int, values: Mapping[str, float]) -> None:
        """Log the values of a round, with the round as the step."""

    def model(self, path: Path) -> None:
        """Log a final model and `inputs.json` beside it, as an artifact if the tracker has artifacts."""

    def close(self, finished: bool) -> None:
        """End the run, or this process's part of it: an unfinished run can be resumed."""


def adapter(name: str) -> type[Tracker]:
    """The class of the tracker of this name. Raise ImportError if its package is not installed."""
    module, kind = _ADAPTERS[name]
    return getattr(import_module(module), kind)


def require_installed(names: Collection[str]) -> None:
    """Raise RayflError, which names the extra to install, for a tracker whose package is not installed."""
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise RayflError(
            " names 'wandb', whose package is not installed: pip install 'rayfl[wandb]', or leave it out",
            ("output", "track"),
        )


def environment(names: Collection[str]) -> dict[str, str]:
    """The environment variables of this process that these trackers read.

    Raise RayflError for more than `MOST_VARIABLES` bytes: they travel with a call, and never lie in the object store.
    """
    found = {key: value for key, value in os.environ.items() if "wandb" in names and key.startswith("WANDB_")}
    sizes = {key: len(os.fsencode(key + value)) for key, value in found.items()}
    if (total := sum(sizes.values())) > MOST_VARIABLES:
        raise RayflError(
            f"the variables of trackers have {total:,} bytes, most of them {max(sizes, key=sizes.__getitem__)}, and "
            f"may have {MOST_VARIABLES:,}: unset what the run does not need"
        )
    return found
