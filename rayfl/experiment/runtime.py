"""Runtime: the `[runtime]` table of an experiment."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayfl.determinism.process import ArithmeticPrecision
from rayfl.errors import refuse_if
from rayfl.settings import Settings, shown, unused_with

LEAST_SHARE = 0.0001
"""The smallest share of a resource that Ray can count."""

LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
"""A value of a node's label, or its key without the prefix, as Kubernetes allows them."""
LABEL_KEY = rf"({LABEL}/)?{LABEL}"
LABEL_SELECTOR = rf"!?({LABEL}|in\({LABEL}(, ?{LABEL})*\))"
NODE_KEY = "ray.io/node-id"
"""A label that Ray itself gives to nodes."""


class Runtime(Settings):
    """The `[runtime]` table: where and how a run executes. threads, engine, stack_width, precision and device change
    the bits of its results."""

    executor: Literal["ray", "inline"] = Field(default="ray", description="ray: client actors; inline: this process")
    actors: Annotated[int, Field(ge=1)] | Literal["all"] | None = Field(
        default=None,
        description="number of client actors; all: as many as fit; default: as many as fit and a round can use",
    )
    num_cpus: float | None = Field(
        default=None, gt=0, description="cores per actor; default: its threads, or an equal share if these do not fit"
    )
    num_gpus: float = Field(default=0.0, ge=0, description="share of a GPU per actor, e.g. 0.25")
    labels: Mapping[str, str] | None = Field(
        default=None, description="labels of the nodes that actors may run on, in the form of Ray's label selectors"
    )
    threads: int = Field(default=1, ge=1, le=1024, description="torch threads per actor")
    mixed: bool = Field(
        default=False,
        description="let machines of different kinds work together; the bits then depend on which machine does what",
    )
    engine: Literal["auto", "loop", "vmap"] = Field(
        default="auto", description="loop: clients one by one; vmap: several at once"
    )
    stack_width: int | None = Field(
        default=None,
        ge=1,
        description="clients that the engine vmap trains at once; default: those of a round, up to 16 (CPU), 64 (GPU)",
        json_schema_extra=unused_with(engine=["loop"]),
    )
    precision: ArithmeticPrecision = Field(
        default="fp32", description="of a model's products: fp32; tf32 (GPUs only); bf16: autocast, weights stay fp32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if num_gpus > 0")
    server_on_device: bool = Field(
        default=False,
        description="keep the server's state, the sums and the update on the GPU, with the same bits; needs executor "
        "'inline' and a method that allows it; no GPU has run it yet",
    )
    graphs: Literal["auto", False] = Field(
        default=False,
        description="auto: capture the steps of local training as CUDA graphs where possible, with the same bits; no "
        "GPU has run it yet",
    )
    address: str | None = Field(
        default=None,
        description="Ray cluster to join: head:6379, or auto for the one here; local: none; default: RAY_ADDRESS",
    )
    object_store_memory_mb: int | None = Field(default=None, ge=80, description="size of a local Ray's object store")
    start_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=1e9,
        description="seconds that actors may take to start; a run on a joined cluster then starts without the others",
    )
    wait_for_room_s: Annotated[float, Field(gt=0, le=1e9)] | Literal["unlimited"] = Field(
        default="unlimited",
        description="seconds that a run on a joined cluster waits until there is room for its first actor",
    )
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
        description="seconds after which the command ends its run, when the current round is over; default: never",
    )

    @model_validator(mode="after")
    def _is_possible(self) -> "Runtime":
        share = self.num_gpus
        labels = self.labels or {}
        refusals = [
            (
                self.device == "cuda" and self.executor == "ray" and share == 0,
                "device",
                "='cuda' needs a share of a GPU for every actor; set runtime.num_gpus, e.g. to 0.25",
            ),
            (
                share > 1,
                "num_gpus",
                f"={share:g} asks for several GPUs an actor, and an actor computes on one; give 1 or a share below 1, "
                "and more actors",
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
                self.server_on_device and (self.executor == "ray" or self.device_name == "cpu"),
                "server_on_device",
                "=true keeps the server on the GPU of this process; set runtime.executor='inline' and device='cuda', "
                "or leave it out",
            ),
            (
                self.graphs == "auto" and self.device_name == "cpu",
                "graphs",
                "='auto' captures CUDA graphs, and the device is 'cpu'; set runtime.num_gpus, or runtime.device='cuda' "
                "with executor='inline', or leave it out",
            ),
            (
                NODE_KEY in labels,
                "labels",
                f" has {NODE_KEY}, which changes whenever a node starts; use another label",
            ),
        ]
        refusals += [
            (
                not re.fullmatch(LABEL_KEY, key) or not re.fullmatch(LABEL_SELECTOR, value),
                "labels",
                f" has {shown(key)} = {shown(value)}, which is not a label selector; give a label's key, and its value "
                "as 'spot', '!spot', 'in(a, b)' or '!in(a, b)'",
            )
            for key, value in labels.items()
        ]
        refuse_if(refusals)
        return self

    @property
    def cluster(self) -> str | None:
        """The address of the Ray cluster to join; None: a Ray of this machine's own."""
        address = self.address or os.environ.get("RAY_ADDRESS")
        return None if address in (None, "", "local") else address

    @property
    def device_name(self) -> str:
        """The device of local work."""
        is_cuda = self.num_gpus > 0 if self.device == "auto" else self.device == "cuda"
        return "cuda" if is_cuda else "cpu"

    @property
    def driver_device(self) -> str:
        """The device of the process that prepares the run."""
        return self.device_name if self.executor == "inline" else "cpu"
