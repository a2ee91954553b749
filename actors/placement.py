"""Placement: how many client actors run, how many cores and what share of a GPU each gets, on which nodes,
and which kinds of machine may compute together.

Ray lets a request that no node can satisfy wait for ever, so each request is first compared with every node.
"""

import math
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray
import torch

from rayfl.determinism.platform import DECISIVE, Platform, commonest, differences, kinds_besides, listed, with_kind
from rayfl.errors import RayflError
from rayfl.experiment.runtime import Runtime
from rayfl.settings import shown

_UNIT = 10_000
"""Ray counts resources in steps of 1/10000."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its address, cores, GPUs, labels and Ray's id."""

    name: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)
    id: str = ""

    def has(self, selector: Mapping[str, str]) -> bool:
        """Whether the labels satisfy one of Ray's label selectors. A missing label is unequal to every value."""
        return all(_allows(condition, self.labels.get(key)) for key, condition in selector.items())

    def holds(self, num_cpus: float, num_gpus: float) -> int:
        """The number of actors of this size that fit on the node. `num_gpus`: at most 1, a part of one GPU."""
        by_cpu = _steps(self.cpus) // _steps(num_cpus) if num_cpus else sys.maxsize
        return min(by_cpu, int(self.gpus) * (_UNIT // _steps(num_gpus))) if num_gpus else by_cpu


@dataclass(frozen=True)
class Placement:
    """The pool of client actors: their number, the resources of each, and the seconds in which they must start and
    answer a call.

    `wait_for_room_s`: the seconds that a run on a joined cluster waits for its first actor; None: `start_timeout_s`.
    `mixed` lets machines that compute other bits work together. `labels` select the nodes. `most`: the number of actors
    to which the pool grows when nodes join; None: nodes neither join nor leave. `notices` are sentences for the user.
    """

    num_actors: int
    num_cpus: float
    num_gpus: float
    start_timeout_s: float = 120.0
    wait_for_room_s: float | None = None
    call_timeout_s: float | None = None
    mixed: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def size(self) -> str:
        """An actor's resources, for a sentence."""
        labels = "".join(f", {key}={value}" for key, value in self.labels.items())
        return f"num_cpus={self.num_cpus:g}, num_gpus={self.num_gpus:g}{labels}"

    @property
    def patience(self) -> tuple[str, float]:
        """The setting that limits the wait for the first actor, and its seconds."""
        if self.wait_for_room_s is None:
            return "runtime.start_timeout_s", self.start_timeout_s
        return "runtime.wait_for_room_s", self.wait_for_room_s

    def room(self, nodes: Sequence[Node], without: Collection[str] = ()) -> int:
        """The number of actors that these nodes hold, those of `without` left out, by their ids."""
        suitable = (node for node in nodes if node.has(self.labels) and node.id not in without)
        return sum(node.holds(self.num_cpus, self.num_gpus) for node in suitable)


def _allows(condition: str, value: str | None) -> bool:
    """Interpret a condition of a label selector as Ray does."""
    inside = re.fullmatch(r"!?in\((.*)\)", condition)
    allowed = re.split(", ?", inside[1]) if inside else [condition.removeprefix("!")]
    return (value in allowed) != condition.startswith("!")


def living_nodes() -> list[Node]:
    """The living nodes of the cluster that this process belongs to."""
    return [
        Node(
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
            node["Labels"],
            node["NodeID"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def place(runtime: Runtime, nodes: Sequence[Node] | None = None, most_calls: int = sys.maxsize) -> Placement:
    """The pool that an experiment asks for, if a round can use `most_calls` actors.

    `nodes`: by default the nodes of the Ray that this process uses. If rayfl did not start the cluster, nodes may join
    and leave: actors without room then wait for nodes, and a run on a cluster without workers waits for the first one.
    Raise RayflError if the nodes cannot hold the pool.
    """
    nodes = living_nodes() if nodes is None else nodes
    joined = runtime.cluster is not None
    waits = _waits(runtime, nodes)
    chosen = nodes if waits else _chosen(runtime, nodes)
    room_s = math.inf if runtime.wait_for_room_s == "unlimited" else runtime.wait_for_room_s
    if not joined and room_s < math.inf:
        raise RayflError(
            f"runtime.wait_for_room_s={room_s:g} is for a cluster that is joined: give runtime.address, or "
            "wait_for_room_s='unlimited'; the limit of a Ray of this machine's own is runtime.start_timeout_s"
        )
    most = _most(runtime, most_calls)
    room = max(1, _room(runtime, chosen))
    wanted = most if isinstance(runtime.actors, int) else min(most, room)
    placement = Placement(
        num_actors=wanted,
        num_cpus=runtime.num_cpus or _default_cpus(runtime, chosen, min(wanted, room) if joined else wanted),
        num_gpus=runtime.num_gpus,
        start_timeout_s=runtime.start_timeout_s,
        wait_for_room_s=room_s if joined else None,
        call_timeout_s=runtime.call_timeout_s,
        mixed=runtime.mixed,
        labels=runtime.labels or {},
        most=most if joined else None,
    )
    fitting = sum(node.holds(placement.num_cpus, placement.num_gpus) for node in chosen)
    if not waits and fitting < (1 if joined else wanted):
        raise RayflError(
            f"runtime.actors={wanted} with num_cpus={placement.num_cpus:g} and num_gpus={runtime.num_gpus:g} each do "
            f"not fit: the cluster holds {fitting} of them ({_listed(chosen)}); ask for fewer actors, "
            "or for less per actor"
        )
    return replace(placement, notices=tuple(_notices(placement, runtime, fitting, most_calls)))


def require_room_here(runtime: Runtime) -> None:
    """Raise RayflError, before Ray starts, if this machine cannot hold the actors. Ray alone knows its labels."""
    place(
        runtime.model_copy(update={"labels": {}}),
        [Node("this machine", os.cpu_count() or 1, torch.cuda.device_count())],
    )


def share(
    runtime: Runtime, parallel: int, most_calls: int = sys.maxsize, nodes: Sequence[Node] | None = None
) -> Runtime:
    """The runtime settings for each of `parallel` simultaneous runs, whose actors all fit. `nodes`: as in `place`.

    Raise RayflError if they do not fit. If the experiment does not set the number of actors, the runs share all the
    room. A single run keeps its settings.
    """
    nodes = living_nodes() if nodes is None else nodes
    if parallel == 1:
        place(runtime, nodes, most_calls)
        return runtime
    actors = _most(runtime, most_calls)
    if not isinstance(runtime.actors, int):
        room = _room(runtime, nodes if _waits(runtime, nodes) else _chosen(runtime, nodes))
        actors = min(max(1, room // parallel), actors)
    try:
        placement = place(runtime.model_copy(update={"actors": actors * parallel}), nodes)
    except RayflError as error:
        raise RayflError(f"{error} (--parallel {parallel}: {actors} actors a run)") from None
    return runtime.model_copy(update={"actors": actors, "num_cpus": placement.num_cpus})


def _waits(runtime: Runtime, nodes: Sequence[Node]) -> bool:
    """Whether the cluster has no worker yet, and may get some."""
    return runtime.cluster is not None and not any(node.cpus for node in nodes)


def _chosen(runtime: Runtime, nodes: Sequence[Node]) -> list[Node]:
    """The nodes with cores that the labels select.

    Raise RayflError if there are none, or none of them can hold an actor.
    """
    workers = [node for node in nodes if node.cpus] or nodes
    labels = runtime.labels or {}
    chosen = [node for node in workers if node.has(labels)]
    asked = ", ".join(f"{key}={value!r}" for key, value in labels.items())
    if not chosen:
        # The values of the labels that are asked for come first.
        known = {(key not in labels, key, value) for node in workers for key, value in node.labels.items()}
        offered = [f"{key}={value}" for _, key, value in sorted(known) if key != "ray.io/node-id"]
        raise RayflError(
            f"runtime.labels asks for {asked}, which no node has; nodes "
            f"have {', '.join(offered[:8]) or 'no labels'}; ask for another, or start a node that has it"
        )
    if not any(node.holds(runtime.num_cpus or 1 / _UNIT, runtime.num_gpus) for node in chosen):
        cpus = f" and runtime.num_cpus={runtime.num_cpus:g}" if runtime.num_cpus else ""
        raise RayflError(
            f"no node{f' with {asked}' if asked else ''} holds a client actor with runtime.num_gpus="
            f"{runtime.num_gpus:g}{cpus} ({_listed(chosen)}); ask for less per actor, or start a larger node"
            + (", or compute without GPUs: runtime.num_gpus=0 and runtime.device='cpu'" if runtime.num_gpus else "")
        )
    return chosen


def _most(runtime: Runtime, most_calls: int) -> int:
    """The number of actors asked for; if none was, the most that a round can use."""
    if isinstance(runtime.actors, int):
        return runtime.actors
    return sys.maxsize if runtime.actors == "all" else most_calls


def _room(runtime: Runtime, nodes: Sequence[Node]) -> int:
    """The number of actors that these nodes hold, each with a core per thread, or on a GPU with at least one core."""
    if runtime.num_cpus is None and runtime.num_gpus:
        return sum(min(int(node.cpus), node.holds(1 / _UNIT, runtime.num_gpus)) for node in nodes)
    held = sum(node.holds(runtime.num_cpus or runtime.threads, runtime.num_gpus) for node in nodes)
    # If no node has a core for each thread, every node holds one actor, which gets all its cores.
    return held if held or runtime.num_cpus else sum(node.cpus > 0 for node in nodes)


def _default_cpus(runtime: Runtime, nodes: Sequence[Node], num_actors: int) -> float:
    """`threads` cores per actor if that fits the nodes or none has cores yet. Otherwise the largest number of cores
    with which all fit, at most cores / actors; 1/10000 if they never fit."""

    def too_large(steps: int) -> bool:
        return sum(node.holds(steps / _UNIT, runtime.num_gpus) for node in nodes) < num_actors

    if not too_large(_UNIT * runtime.threads) or not any(node.cpus for node in nodes):
        return float(runtime.threads)
    # The more cores an actor gets, the fewer actors fit, so the shares that fit come before those that do not.
    shares = range(1, 1 + sum(_steps(node.cpus) for node in nodes) // num_actors)
    return max(1, bisect_left(shares, True, key=too_large)) / _UNIT


def _notices(placement: Placement, runtime: Runtime, fitting: int, most_calls: int) -> list[str]:
    """The sentences for the user about a pool of which `fitting` actors have room now."""
    wanted = placement.num_actors
    stacks = runtime.engine == "vmap" or (runtime.engine == "auto" and runtime.num_gpus > 0)
    waits = placement.most is not None and not fitting
    rows = [
        (
            wanted > most_calls,
            f"runtime.actors={shown(runtime.actors)}: a round has work for {most_calls} at once, so "
            f"{wanted - most_calls} of {wanted} actors idle while clients train"
            + "; where clients train in stacks, a smaller runtime.stack_width gives more of them work"
            * stacks,
        ),
        (
            waits,
            "the cluster has no node for client actors yet; waiting for one (runtime.wait_for_room_s="
            f"{str(runtime.wait_for_room_s).removesuffix('.0')}): rayfl asks for {wanted} actors with {placement.size} "
            "each, which an autoscaler sees",
        ),
        (
            fitting < wanted and not waits,
            f"the cluster has room for {fitting} of {wanted} client actors ({placement.size} each); the others start "
            "when nodes join",
        ),
    ]
    return [sentence for applies, sentence in rows if applies]


def _steps(amount: float) -> int:
    return round(amount * _UNIT)


def _listed(nodes: Sequence[Node]) -> str:
    shown = [f"{node.name}: {node.cpus:g} cores, {node.gpus:g} GPUs" for node in nodes[:4]]
    return "; ".join(shown + [f"and {len(nodes) - 4} more nodes"] * (len(nodes) > 4))


@dataclass(frozen=True)
class Verdict:
    """Whether an actor may work, and a sentence for the user, which may be empty."""

    admitted: bool
    notice: str = ""


class Machines:
    """The kinds of machine that compute a run: those that compute the same bits, or all of them if the run is mixed.

    `platform`: the leading one, in the form of platform.json; {}: none yet.

    A resumed run keeps the kind with which it began. A new run takes the kind of most of its first actors.
    """

    def __init__(self, platform: Platform, mixed: bool = False, resume: str = "rayfl resume DIR") -> None:
        self.platform = platform
        self.mixed = mixed
        self._resume = resume
        self._differences: list[str] = []

    def lead(self, platforms: Sequence[Platform]) -> None:
        """Make the most common platform in `platforms` the run's platform, unless the run has one."""
        if not self.platform:
            self.platform = commonest(platforms)
        # Ray, Python and the number of cores may have changed since the run was stopped.
        alike = next((platform for platform in platforms if not differences(self.platform, platform)), {})
        self.platform = {**self.platform, **{key: value for key, value in alike.items() if key not in DECISIVE}}

    def admit(self, platform: Platform, address: str) -> Verdict:
        """Whether an actor of this kind, on the node at `address`, may work. A mixed run records the kind."""
        unlike = differences(self.platform, platform)
        if not unlike:
            return Verdict(True)
        if self.mixed:
            known = len(kinds_besides(self.platform))
            self.platform = with_kind(self.platform, platform)
            notice = (
                f"node {address} works too, because runtime.mixed is set, although the run has {listed(unlike)}: the "
                "results depend on which node does what"
            )
            return Verdict(True, notice if len(kinds_besides(self.platform)) > known else "")
        self._differences = unlike
        return Verdict(False, f"node {address} is not used, because the run has {listed(unlike)}")

    def none_left(self) -> str:
        """The error for a run if no node is left that computes the same bits; "" if no node was excluded."""
        if not self._differences:
            return ""
        return (
            f"no node is left that computes the same bits: the run has {listed(self._differences)}; go on with nodes "
            f"like those: {self._resume}, or accept other bits: {self._resume} runtime.mixed=true"
        )
