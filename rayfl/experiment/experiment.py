"""Experiment: the whole description of a run, read from TOML, validated once, written back as it was resolved."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, field_validator, model_validator

from rayfl.choices import plugins
from rayfl.choices.kinds import TO_TABLE, as_table, find, from_table, known, reference
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.data.datasets import Source
from rayfl.data.partition import PartitionScheme
from rayfl.determinism.process import InstructionSet, Precision
from rayfl.errors import RayflError, UnknownKey
from rayfl.experiment.report_options import ReportOptions
from rayfl.experiment.table import LONGEST_NAME, read_table, with_overrides
from rayfl.experiment.unknown_keys import explained
from rayfl.methods.base import HyperParameters, Method
from rayfl.methods.shared.elastic import Elastic, ElasticHyper
from rayfl.models.base import Architecture
from rayfl.population.sampling import Clients
from rayfl.rounds.setup import Evaluation
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.object_storage import is_url, require_url
from rayfl.run_directory.trackers.tracker import TrackerName
from rayfl.settings import Settings, dotted, shown, unused_with
from rayfl.task import BoundTask
from rayfl.tasks.base import Task
from rayfl.topology.graphs import Topology

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""The allowed names of an experiment. Its run directory has the same name."""


@dataclass(frozen=True)
class MethodChoice:
    """The `[method]` table: a method, its hyper-parameters, and those of elastic aggregation around it."""

    kind: type[Method]
    hyper: HyperParameters
    elastic: ElasticHyper | None = None

    @property
    def name(self) -> str:
        """The name by which the method is found again."""
        return reference(self.kind)

    def make(self, task: BoundTask, rounds: int) -> Method:
        """The method on a task, for an experiment of `rounds` rounds."""
        chosen = self.kind(task, self.hyper.for_num_rounds(rounds))
        return chosen if self.elastic is None else Elastic(chosen, self.elastic)

    @property
    def splits(self) -> Mapping[str, float]:
        """The further splits that the method needs, with their default shares of the train split."""
        return {**self.kind.splits, **({} if self.elastic is None else Elastic.splits)}

    def to_table(self) -> dict[str, Any]:
        """The table that makes this choice again."""
        elastic = {} if self.elastic is None else {"elastic": self.elastic.model_dump()}
        return {"name": self.name, **self.hyper.model_dump(), **elastic}


# Any: tables come from a file, and their values get their types here.
def _choice(value: Any, info: ValidationInfo) -> MethodChoice:
    if isinstance(value, MethodChoice):
        return value
    if isinstance(value, Elastic):
        return replace(_choice(value.inner, info), elastic=value.hyper)
    if isinstance(value, Method):
        return MethodChoice(kind=find(Method, type(value)), hyper=value.hyper)
    table = as_table(value, info.field_name)
    if "name" not in table:
        raise RayflError(f" is missing; a method is one of {', '.join(sorted(known(Method)))}", ("name",))
    kind, elastic = find(Method, table.pop("name")), _elastic(table.pop("elastic", False))
    return MethodChoice(kind=kind, hyper=kind.Hyper(**table), elastic=elastic)


# Any: true, false or a table.
def _elastic(value: Any) -> ElasticHyper | None:
    """The settings of elastic aggregation, or None without it."""
    if isinstance(value, bool):
        return ElasticHyper() if value else None
    if not isinstance(value, Mapping):
        raise RayflError(f"={shown(value)} is not allowed; it must be true, false or a table", ("elastic",))
    try:
        return ElasticHyper(**value)
    except RayflError as error:
        raise error.under("elastic") from None


class Splits(Settings):
    """The `[splits]` table: shares of every client's train split that are set aside before round 0.

    None: the method's default, which is 0 for most.
    """

    validation_ratio: float | None = Field(
        default=None, ge=0, lt=1, description="share for methods that choose by validation data"
    )
    heldout_ratio: float | None = Field(
        default=None, ge=0, lt=1, description="share of unlabelled samples, for Elastic"
    )


LEAST_SHARE = 0.0001
"""The smallest share of a resource that Ray can count."""

LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
"""A value of a node's label, or its key without the prefix, as Kubernetes allows them."""
LABEL_KEY = rf"({LABEL}/)?{LABEL}"
LABEL_SELECTOR = rf"!?({LABEL}|in\({LABEL}(, ?{LABEL})*\))"
ACCELERATOR_KEY, NODE_KEY = "ray.io/accelerator-type", "ray.io/node-id"
"""Labels that Ray itself gives to nodes."""


class Runtime(Settings):
    """The `[runtime]` table: where and how a run executes. threads, instruction_set, engine, stack_width,
    precision and device change the bits of its results."""

    executor: Literal["ray", "inline"] = Field(default="ray", description="ray: client actors; inline: this process")
    actors: Annotated[int, Field(ge=1)] | Literal["all"] | None = Field(
        default=None,
        description="number of client actors; all: as many as fit; default: as many as fit and a round can use",
    )
    num_cpus: float | None = Field(
        default=None, gt=0, description="cores per actor; default: its threads, or an equal share if these do not fit"
    )
    num_gpus: float = Field(default=0.0, ge=0, description="share of a GPU per actor, e.g. 0.25")
    strategy: Literal["spread", "pack"] = Field(
        default="spread", description="spread: actors on as many nodes as there are; pack: on as few as have room"
    )
    labels: Mapping[str, str] | None = Field(
        default=None, description="labels of the nodes that actors may run on, in the form of Ray's label selectors"
    )
    accelerator_type: str | None = Field(
        default=None, description="accelerator of the nodes that actors may run on, e.g. A100"
    )
    threads: int = Field(default=1, ge=1, le=1024, description="torch threads per actor")
    instruction_set: InstructionSet = Field(
        default="native", description="native: what the processor has; avx2: slower, the same on all that have AVX2"
    )
    mixed: bool = Field(
        default=False, description="let unlike machines work together; bits then depend on which machine does what"
    )
    engine: Literal["auto", "loop", "vmap"] = Field(
        default="auto", description="loop: clients one by one; vmap: several at once"
    )
    stack_width: int | None = Field(
        default=None,
        ge=1,
        description="clients that the engine vmap trains at once; default: by the model's size",
        json_schema_extra=unused_with(engine=["loop"]),
    )
    precision: Precision = Field(
        default="fp32", description="of a model's products: fp32; tf32 (GPUs only); bf16: autocast, weights stay fp32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if num_gpus > 0")
    address: str | None = Field(
        default=None,
        description="Ray cluster to join: head:6379, or auto for the one here; local: none; default: RAY_ADDRESS",
    )
    object_store_memory_mb: int | None = Field(default=None, ge=80, description="size of a local Ray's object store")
    start_timeout_s: float = Field(default=120.0, gt=0, le=1e9, description="seconds that actors may take to start")
    call_timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="seconds after which an actor that does not answer is replaced; default: never",
    )
    limit_s: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="seconds after which the command ends its run, after the round under way; default: never",
    )

    @model_validator(mode="after")
    def _is_possible(self) -> "Runtime":
        share, kind, labels = self.num_gpus, self.accelerator_type, self.labels or {}
        refusals = [
            (
                self.device == "cuda" and self.executor == "ray" and share == 0,
                "device",
                "='cuda' needs a share of a GPU for every actor; set runtime.num_gpus, e.g. to 0.25",
            ),
            (
                share > 1 and share != int(share),
                "num_gpus",
                f"={share:g} an actor is not allowed; give a share below 1, or a whole number",
            ),
            (
                0 < share < LEAST_SHARE,
                "num_gpus",
                f"={share:g} an actor is less than Ray can count; give at least {LEAST_SHARE:g}",
            ),
            (
                self.precision == "tf32" and self.device_name == "cpu",
                "precision",
                "='tf32' is for GPUs, and the device is 'cpu'; use 'fp32', or 'bf16'",
            ),
            (
                NODE_KEY in labels,
                "labels",
                f" has {NODE_KEY}, which changes whenever a node starts; use another label",
            ),
            (
                kind is not None and not re.fullmatch(LABEL, kind),
                "accelerator_type",
                f"={shown(kind)} is no name of an accelerator; give one as Ray writes it, e.g. 'A100'",
            ),
            (
                kind is not None and ACCELERATOR_KEY in labels,
                "accelerator_type",
                f" is the label {ACCELERATOR_KEY}, which labels has too; give one of them",
            ),
        ]
        refusals += [
            (
                not re.fullmatch(LABEL_KEY, key) or not re.fullmatch(LABEL_SELECTOR, value),
                "labels",
                f" has {shown(key)} = {shown(value)}, which is no label selector; give a label's key, and its value as "
                "'spot', '!spot', 'in(a, b)' or '!in(a, b)'",
            )
            for key, value in labels.items()
        ]
        for is_wrong, key, words in refusals:
            if is_wrong:
                raise RayflError(words, (key,))
        return self

    @property
    def selector(self) -> dict[str, str]:
        """The labels of the nodes that actors may run on, `accelerator_type` among them."""
        kind = {} if self.accelerator_type is None else {ACCELERATOR_KEY: self.accelerator_type}
        return {**(self.labels or {}), **kind}

    @property
    def cluster(self) -> str | None:
        """The address of the Ray cluster to join; None: a Ray of this machine's own."""
        address = self.address or os.environ.get("RAY_ADDRESS")
        return None if address in (None, "", "local") else address

    @property
    def device_name(self) -> str:
        """The device of local work."""
        if self.device != "auto":
            return self.device
        return "cuda" if self.num_gpus > 0 else "cpu"

    @property
    def driver_device(self) -> str:
        """The device of the process that prepares the run."""
        return self.device_name if self.executor == "inline" else "cpu"


TAG = r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$"
"""The tags that all trackers allow."""


class Output(Settings):
    """The `[output]` table: where the run directory goes, and who follows the run."""

    directory: str = Field(
        default="runs",
        description="folder for run directories; if a URL, such as s3://bucket/folder: runs/, and copied to the URL",
    )
    report: bool = Field(default=True, description="write report.html at the end")
    save_models: bool = Field(default=True, description="save the final models")
    # output.track=mlflow on the command line is ["mlflow"].
    track: Annotated[
        tuple[TrackerName, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
    ] = Field(
        default=("tensorboard",), description="trackers that get the rounds: tensorboard, mlflow, wandb; []: none"
    )
    group: str | None = Field(
        default=None, min_length=1, description="the run's group in trackers; of a sweep, by default its directory"
    )
    tags: tuple[Annotated[str, Field(pattern=TAG)], ...] = Field(
        default=(), description="the run's tags in trackers, beside method and data"
    )

    @field_validator("directory")
    @classmethod
    def _is_known_storage(cls, directory: str) -> str:
        if is_url(directory):
            require_url(directory)
        return directory

    @field_validator("track")
    @classmethod
    def _each_once(cls, names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(names)) < len(names):
            raise RayflError(f"={shown(names)} names a tracker twice; name each once", key=("track",))
        return names


NO_RATIO = (None, 0.1)
"""What the `keep_ratio` of a compressor is where it is not given."""


class Experiment(Settings):
    """The whole description of a run; each table of the TOML file is a field."""

    name: str = Field(default="experiment", description="names the run")
    label: str | None = Field(default=None, min_length=1, description="what legends call the run; default: its name")
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
    topology: Annotated[Topology, from_table(Topology), TO_TABLE] | None = None
    splits: Splits = Field(default_factory=Splits)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    runtime: Runtime = Field(default_factory=Runtime)
    checkpoint: Checkpoints = Field(default_factory=Checkpoints)
    output: Output = Field(default_factory=Output)
    report: ReportOptions = Field(default_factory=ReportOptions)

    # Any: the values are the user's, and pydantic is what gives them their types.
    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except UnknownKey as error:
            raise explained(error, type(self), values) from None

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str) -> str:
        if not re.fullmatch(NAME, name):
            raise RayflError(
                f"={shown(name)} is not allowed; use letters, digits, '.', '_' and '-', "
                "and begin with a letter or a digit",
                key=("name",),
            )
        if len(name) > LONGEST_NAME:
            raise RayflError(f"={shown(name)} has {len(name)} letters; use at most {LONGEST_NAME}", key=("name",))
        return name

    def unused(self) -> Mapping[str, str]:
        return self.method.kind.unused(self.method.hyper)

    @model_validator(mode="after")
    def _one_ratio(self) -> "Experiment":
        """Refuse two settings for the same thing."""
        hyper, names = self.method.hyper, self.method.kind.own_retention
        own = [f"method.{name}={shown(getattr(hyper, name))}" for name in names if hyper.is_given(name)]
        uplink = {} if self.method.kind.honours_retention else dotted(self.uplink.to_table())
        own += [f"uplink.{key}={one}" for key, one in uplink.items() if "keep_ratio" in key and one not in NO_RATIO]
        if own and self.clients.retention_ratio is not None:
            raise RayflError(f"{own[0]} and clients.retention_ratio are both given; give one of them")
        return self

    @model_validator(mode="after")
    def _fits(self) -> "Experiment":
        if self.downlink.name == "feedback":
            raise RayflError(
                " 'feedback' is not allowed, because a downlink keeps no memory; give its inner compressor alone",
                key=("downlink",),
            )
        self.method.hyper.for_num_rounds(self.rounds)
        return self

    @property
    def in_memory(self) -> list[str]:
        """The objects from Python that cannot be made again by a name, in words."""
        names = [(table.get("name") if isinstance(table, dict) else None) for table in self.as_dict().values()]
        return [name.removeprefix(plugins.MEMORY) for name in names if name is not None and plugins.is_in_memory(name)]

    def as_dict(self) -> dict[str, Any]:
        """The experiment as plain JSON values; `Experiment(**as_dict())` is the same experiment."""
        return self.model_dump(mode="json")


# Any: settings of any type.
def make_experiment(table: Mapping[str, Any]) -> Experiment:
    """The experiment that a table describes. Raise RayflError if the table is not a valid experiment."""
    return Experiment(**table)


def read(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a TOML file, with `key=value` overrides (dotted keys, TOML values, bare words as strings).

    A `[sweep]` table is left out: this is the experiment that the sweep varies (`sweep.read_sweep` reads all).
    """
    table, _ = with_overrides(read_table(path), overrides)
    return make_experiment(table)
