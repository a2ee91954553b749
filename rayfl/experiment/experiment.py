"""Experiment: the whole description of a run, read from TOML, validated once, written back as it was resolved."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, field_validator, model_validator

from rayfl.choices import plugins
from rayfl.choices.kinds import TO_TABLE, Kind, as_table, find, from_table, known, reference
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.data.datasets import Source
from rayfl.data.partition import PartitionScheme
from rayfl.errors import RayflError, UnknownKey, some_of
from rayfl.experiment.report_options import ReportOptions
from rayfl.experiment.runtime import Runtime
from rayfl.experiment.table import LONGEST_NAME, read_table, with_overrides
from rayfl.experiment.unknown_keys import explained
from rayfl.methods.base import HyperParameters, Method
from rayfl.methods.shared.own_parts import Parts
from rayfl.methods.shared.wrapper import WrappingClients
from rayfl.metrics.base import Metric
from rayfl.models.adapters import Adapters
from rayfl.models.base import Architecture
from rayfl.population.sampling import Clients
from rayfl.rounds.early_stop import EarlyStop
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.object_storage import is_url, require_url
from rayfl.run_directory.trackers.tracker import TrackerName
from rayfl.schedules.base import Schedule
from rayfl.schedules.synchronous import Synchronous
from rayfl.selections.base import Selection
from rayfl.selections.plain import Uniform
from rayfl.settings import Settings, dotted, shown
from rayfl.task import BoundTask
from rayfl.tasks.base import Task
from rayfl.topology.graphs import Topology
from rayfl.untyped import Value
from rayfl.wrappers.base import MessageWrapper, Wrapper

NAME = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}"
"""The allowed names of an experiment. Its run directory has the same name."""


@dataclass(frozen=True)
class MethodChoice:
    """The `[method]` table: a method and its hyper-parameters."""

    kind: type[Method]
    hyper: HyperParameters

    @property
    def name(self) -> str:
        """The name by which the method is found again."""
        return reference(self.kind)

    def make(self, task: BoundTask, rounds: int) -> Method:
        """The method on a task, for an experiment of `rounds` rounds."""
        return self.kind(task, self.hyper.for_num_rounds(rounds))

    def to_table(self) -> dict[str, Value]:
        """The table that makes this choice again."""
        return {"name": self.name, **self.hyper.model_dump()}


def _choice(value: Value, info: ValidationInfo) -> MethodChoice:
    if isinstance(value, MethodChoice):
        return value
    if isinstance(value, WrappingClients):
        raise RayflError(f" is a wrapper, {type(value).__name__}; give the method inside it, and the wrapper in wrap")
    if isinstance(value, Method):
        return MethodChoice(kind=find(Method, type(value)), hyper=value.hyper)
    table = as_table(value, info.field_name)
    if "name" not in table:
        raise RayflError(f" is missing; a method is one of {some_of(known(Method))}", ("name",))
    kind = find(Method, table.pop("name"))
    return MethodChoice(kind=kind, hyper=kind.Hyper(**table))


class Splits(Settings):
    """The `[splits]` table: shares of every client's train split that are set aside before round 0.

    None: the method's default, which is 0 for most.
    """

    validation_ratio: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="share for methods that choose by validation data, and for evaluation.split='validation'",
    )
    heldout_ratio: float | None = Field(
        default=None, ge=0, lt=1, description="share of unlabelled examples, for Elastic"
    )


class Output(Settings):
    """The `[output]` table: where the run directory goes, what is written, and which trackers get the values."""

    directory: str = Field(
        default="runs",
        description="folder for run directories, or a URL (s3://bucket/folder), to which runs in runs/ are then copied",
    )
    report: bool = Field(default=True, description="write report.html at the end")
    save_models: bool = Field(default=True, description="save the final models")
    # output.track=wandb on the command line is ["wandb"].
    track: Annotated[
        tuple[TrackerName, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
    ] = Field(default=("tensorboard",), description="trackers that get the rounds: tensorboard, wandb; []: none")

    @field_validator("directory")
    @classmethod
    def _is_known_storage(cls, directory: str) -> str:
        if is_url(directory):
            require_url(directory)
        return directory


NO_RATIO = (None, 0.1)
"""The values of a compressor's `keep_ratio` that say nothing: none, and the default."""
CHOSEN: Mapping[str, type[Kind]] = {
    "method": Method,
    "model": Architecture,
    "data": Source,
    "partition": PartitionScheme,
    "uplink": Compressor,
    "downlink": Compressor,
    "topology": Topology,
    "selection": Selection,
    "schedule": Schedule,
    "task": Task,
}
"""The tables that choose a method, a model, ... by its name, and have its settings."""
LISTED: Mapping[str, type[Kind]] = {**CHOSEN, "evaluation.metrics": Metric, "wrap": Wrapper}
"""The same, and the settings that are lists of choices."""


class Experiment(Settings):
    """The whole description of a run; each table of the TOML file is a field."""

    name: str = Field(default="experiment", description="name of the run")
    label: str | None = Field(default=None, min_length=1, description="the run's name in legends; default: name")
    swept: Mapping[str, str] = Field(
        default_factory=dict, description="the run's value of each swept key, which a sweep writes; tables use it"
    )
    seed: int = Field(default=1, ge=0, description="the only source of randomness")
    rounds: int = Field(ge=1, description="communication rounds, T")
    data: Annotated[Source, from_table(Source), TO_TABLE]
    partition: Annotated[PartitionScheme, from_table(PartitionScheme), TO_TABLE]
    clients: Clients
    model: Annotated[Architecture, from_table(Architecture), TO_TABLE]
    task: Annotated[Task, from_table(Task), TO_TABLE] | None = None
    method: Annotated[MethodChoice, BeforeValidator(_choice), PlainSerializer(MethodChoice.to_table)]
    uplink: Annotated[Compressor, from_table(Compressor), TO_TABLE] = Field(default_factory=Dense)
    downlink: Annotated[Compressor, from_table(Compressor), TO_TABLE] = Field(default_factory=Dense)
    wrap: Annotated[
        tuple[Annotated[Wrapper, from_table(Wrapper), TO_TABLE], ...],
        BeforeValidator(lambda given: given if isinstance(given, list | tuple) else (given,)),
    ] = Field(default=(), description="wrappers around the method, the innermost first, each by its name or as a table")
    selection: Annotated[Selection, from_table(Selection), TO_TABLE] = Field(default_factory=Uniform)
    schedule: Annotated[Schedule, from_table(Schedule), TO_TABLE] = Field(default_factory=Synchronous)
    topology: Annotated[Topology, from_table(Topology), TO_TABLE] | None = None
    adapters: Adapters | None = None
    parts: Parts = Field(default_factory=Parts)
    splits: Splits = Field(default_factory=Splits)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    stop: EarlyStop | None = None
    runtime: Runtime = Field(default_factory=Runtime)
    checkpoint: Checkpoints = Field(default_factory=Checkpoints)
    output: Output = Field(default_factory=Output)
    report: ReportOptions = Field(default_factory=ReportOptions)

    def __init__(self, **values: Value) -> None:
        try:
            super().__init__(**values)
        except UnknownKey as error:
            raise explained(error, type(self), CHOSEN, values) from None

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str) -> str:
        if not re.fullmatch(NAME, name):
            raise RayflError(
                f"={shown(name)} is not allowed; use at most {LONGEST_NAME} letters, digits, '.', '_' and '-', and "
                "begin with a letter or a digit",
                key=("name",),
            )
        return name

    def unused(self) -> Mapping[str, str]:
        unused = dict(self.method.kind.unused(self.method.hyper))
        if self.parts.personal or self.parts.buffers == "personal":
            unused.pop("evaluation.personal_on_pooled", None)
        if self.stop is not None and not self.output.save_models:
            unused["stop.keep"] = "with output.save_models=false"
        return unused

    @model_validator(mode="after")
    def _fits(self) -> "Experiment":
        """Refuse settings that do not fit the number of rounds, and two settings for the same thing."""
        hyper = self.method.hyper
        can = self.method.kind.capabilities
        fitted = hyper.for_num_rounds(self.rounds)
        if self.stop is not None:
            self._require_free_end(fitted)
        ratios = [f"method.{name}={shown(getattr(hyper, name))}" for name in can.own_retention if hyper.is_given(name)]
        uplink = {} if can.honours_retention else dotted(self.uplink.to_table())
        ratios += [
            f"uplink.{key}={value}" for key, value in uplink.items() if "keep_ratio" in key and value not in NO_RATIO
        ]
        if ratios and self.clients.retention_ratio is not None:
            raise RayflError(f"{ratios[0]} and clients.retention_ratio are both given; give one of them")
        return self

    def _require_free_end(self, fitted: HyperParameters) -> None:
        """Refuse an early stop if the method depends on the number of rounds. fitted: its settings for that number."""
        method = self.method
        earlier = method.hyper.for_num_rounds(max(1, self.rounds - 1))
        follows = [name for name, value in fitted if value != getattr(earlier, name)]
        if follows or method.kind.capabilities.depends_on_num_rounds:
            what = f"method.{follows[0]}" if follows else "its rounds"
            raise RayflError(
                f" may end the run before rounds={self.rounds}, and with method {method.name!r} {what} "
                f"{'follows' if follows else 'follow'} from that number; remove it"
                + (f", or give {what}" if follows else ""),
                ("stop",),
            )
        if self.evaluation.every == 0:
            raise RayflError(
                " counts evaluations, and evaluation.every=0 evaluates only after the last round; raise it",
                ("stop",),
            )

    @field_validator("wrap")
    @classmethod
    def _go_together(cls, wrap: tuple[Wrapper, ...]) -> tuple[Wrapper, ...]:
        names = [wrapper.name for wrapper in wrap]
        if len({*names}) < len(names):
            raise RayflError(f"={shown(names)} names a wrapper twice; name each once", key=("wrap",))
        if first := [wrapper.name for wrapper in wrap[:-1] if isinstance(wrapper, MessageWrapper) and wrapper.sees_all]:
            raise RayflError(f": {first[0]!r} must see all that clients send; make it the last one", key=("wrap",))
        return wrap

    @property
    def in_memory(self) -> list[str]:
        """The objects from Python that cannot be made again by a name, in words."""
        tables = [
            table for value in self.as_dict().values() for table in (value if isinstance(value, list) else [value])
        ]
        names = [str(table.get("name")) for table in tables if isinstance(table, dict)]
        return [name.removeprefix(plugins.MEMORY) for name in names if plugins.is_in_memory(name)]

    def as_dict(self) -> dict[str, Value]:
        """The experiment as plain JSON values; `Experiment(**as_dict())` is the same experiment."""
        return self.model_dump(mode="json")


def read(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a TOML file, with `key=value` overrides (dotted keys, TOML values, bare words as strings).

    A `[sweep]` table is left out: this is the experiment that the sweep varies (`sweep.read_sweep` reads all).
    """
    table, _ = with_overrides(read_table(path), overrides)
    return Experiment(**table)
