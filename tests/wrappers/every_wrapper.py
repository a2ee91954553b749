"""Every wrapper under contract: with what else in the experiment it runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfl import tree
from rayfl.choices.kinds import named
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Context, Metrics, State, Tree
from rayfl.rounds.setup import Setup
from rayfl.wrappers.base import MessageWrapper, Wrapper
from tests.contracts.every_method import experiment

MINE = f"{Path(__file__).resolve().parents[2]}/jobs/examples/my_wrappers.py"
EXAMPLE, TRAINING, ROBUST = (f"{MINE}:{name}" for name in ("WorkerMomentum", "WeightDecay", "ShortestMean"))
EVERY = [*sorted(named(Wrapper)), EXAMPLE, TRAINING, ROBUST]
UNIFORM = {"method": {"name": "fedavg", "batch_size": 60, "weighting": "uniform"}}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "clip": {"quantile": 0.5},
    "central-dp": {"quantile": 0.5, "count_noise": 0.6, "norm": 0.2},
}
"""Settings of wrappers under contract."""
WEIGHTED = ("clip", "attack", "elastic")
BESIDE: Mapping[str, Mapping[str, Any]] = {name: UNIFORM for name in (*named(Wrapper), ROBUST) if name not in WEIGHTED}
"""What an experiment must have beside a wrapper."""


def here(*wrap: Any, method: str | Mapping[str, Any] | None = None, **options: Any) -> Setup:
    """Six clients on digits, three rounds, with these wrappers, each with its options under contract."""
    tables = [{"name": one, **OPTIONS.get(one, {})} if isinstance(one, str) else one for one in wrap]
    beside: dict[str, Any] = {}
    for one in tables:
        beside |= BESIDE.get(one["name"], {}) if isinstance(one, Mapping) else {}
    name = method["name"] if isinstance(method, Mapping) else method or "fedavg"
    if isinstance(method, str):
        beside.pop("method", None)
    options = {**beside, **({"method": method} if isinstance(method, Mapping) else {}), **options}
    return prepare(experiment(name, wrap=tables, **options))


class Recorder(MessageWrapper):
    """Notes what it sees in this process."""

    seen: ClassVar[list[tuple[int, int, Mapping[str, Tree]]]] = []

    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        self.seen.append((ctx.round, ctx.traits.id, trees))
        return trees, state, {}


class Later(Recorder):
    """Another one."""

    seen: ClassVar[list[tuple[int, int, Mapping[str, Tree]]]] = []


def flat(trees: Mapping[str, Tree]) -> np.ndarray:
    return np.concatenate([tree.vector(one).double().numpy() for one in trees.values()])
