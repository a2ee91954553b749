"""The methods under contract: all that the registry finds, on digits, and those that prove the seams, on quadratics."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from rayfl.choices.kinds import find, named
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method, PeerHalf, ServerHalf
from rayfl.methods.masks.dispfl import DisPFL
from rayfl.methods.server.scaffold import Scaffold
from rayfl.methods.shared.wrapper import Wrapping
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import fitting_graph, play
from rayfl.topology.graphs import FullyConnected
from rayfl.wrappers.elastic import Elastic
from tests.contracts.seams import quadratic

# Any: an experiment's tables.
Options = Mapping[str, Any]

HYPER: Mapping[str, Options] = {
    # All of them run with top k too, which states no omega, so that nothing may be left to follow from it.
    "diana": {"alpha": 0.5, "momentum": 0.5},
    "adiana": {"alpha": 0.5, "refresh_probability": 0.6, "eta": 0.05},
    # Of three rounds of seed 5 the last is one of differences.
    "marina": {"dense_probability": 0.6},
    # Momentum and random regrowth here, gradients on the quadratics.
    "dispfl": {"steps": 4, "regrow": "random", "momentum": 0.5, "density": 0.3},
    # Rates at which a round moves masks, and filters of 64 entries of which some are too thin.
    "mcepl": {"batch_size": 16, "retention_ratio": 0.1, "weight_scale": 3.0},
    "ind_mask": {"batch_size": 16, "retention_ratio": 0.1, "weight_scale": 3.0},
    **{name: {"lr": 0.1, "batch_size": 16} for name in ("ind_weipru", "avr_weipru", "par_weipru")},
    "lottery_dsgd": {"steps": 4, "batch_size": 16, "min_accuracy": 0.1},
    # In rounds 0 to 3 of seed 3 the coin says: mean, gradient, mean, gradient. Round 2 exchanges.
    "l2gd": {"p": 0.5, "lam": 0.5},
    "easgd": {"steps": 3},
    # Gates that open within three rounds.
    "subfedavg": {"lr": 0.1, "epochs": 2, "min_accuracy": 0.05, "prune_ratio": 0.3},
    "lotteryfl": {"lr": 0.1, "epochs": 2, "min_accuracy": 0.05},
    # Few steps of those that take two gradients a step, or many steps by default.
    **{name: {"steps": 3, "inner_steps": 2} for name in ("pfedme", "pfedmac")},
    "perfedavg": {"steps": 3},
    "fedala": {"first_passes": 3},
    # Slices of three widths.
    **{name: {"dynamic_ratios": [0.25, 0.5, 1.0]} for name in ("heterofl", "feddropout", "fedrolex")},
    # Both chance and affinity choose.
    "fedfomo": {"num_candidates": 3, "epsilon": 0.6},
    # Masks that move in three rounds.
    "fedpm": {"lr": 0.1, "epochs": 1},
    "feddst": {"lr": 0.1, "epochs": 1, "readjust_every": 2, "readjust_end": 3},
    "hetlora": {"lr": 0.1, "epochs": 2, "pruned_share": 0.75, "penalty": 0.1},
    "flash": {"variant": "jmwst", "density": 0.3, "warm_up_epochs": 2},
}
"""Hyper-parameters under contract, of methods whose defaults would leave something out."""


ADAPTED: Mapping[str, Options] = {"adapters": {"layers": ["*1"], "rank": 4, "trained": ["*.bias"]}}
TABLES: Mapping[str, Options] = {
    **dict.fromkeys(("hetlora", "flexlora"), ADAPTED),
    "flora": {"adapters": {**ADAPTED["adapters"], "merged": True}},
}
"""Further tables of methods that need them."""


BATCH_SIZE = 60
"""The batch size under contract of methods with batches by default: an epoch has fewer steps."""

# FedPSE at 60 has entries so alike that rounding decides which of them are the largest.
OTHER_BATCH_SIZES: Mapping[str, int] = {"fedpse": 32, "subfedavg": 20, "lotteryfl": 20}

SEEDS: Mapping[str, int] = {"l2gd": 3}
"""Seeds under contract, of methods that do not exchange in each of the first rounds of seed 5."""


FEW_EXAMPLES: Options = {"validation_ratio": 0.6}
"""Splits under contract: clients train on 40 % of their examples, in fewer steps."""
# FedFomo chooses three candidates, from more than three other clients.
NUM_CLIENTS: Mapping[str, int] = {"fedfomo": 6}
"""Clients under contract, of methods that need more than four: every client costs time in every test."""


@dataclass(frozen=True)
class Case:
    """A method and how its setup is made; `make` takes what `quadratic.setup` takes, but for the method.

    Tests are collected by the class alone, so that no setup is made before a test runs.
    """

    name: str
    make: Callable[..., Setup]
    num_clients: int
    kind: type[Method]


def experiment(name: str, **options: Any) -> Experiment:
    """Unequal clients on digits, six by default, a small network. `options` go over the tables."""
    tables: dict[str, Any] = {
        "rounds": 3,
        "seed": SEEDS.get(name, 5),
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 1.0},
        "model": {"name": "mlp", "hidden": [12]},
        "method": {"name": name, **batches(named(Method)[name]), **own(name, options.get("clients", {}))},
        **TABLES.get(name, {}),
        **options,
    }
    tables["clients"] = {"count": 6, **options.get("clients", {})}
    kind = named(Method)[name]
    can = kind.capabilities
    if can.uses_graph or (kind.gather and issubclass(kind, PeerHalf)):
        tables.setdefault("topology", fitting_graph(can))
    if can.in_pairs:
        tables.setdefault("schedule", {"name": "gossip", "partners": 1})
    return Experiment(**tables)


def own(name: str, clients: Options) -> Options:
    """A method's hyper-parameters under contract, without a share that `clients` give instead."""
    instead = named(Method)[name].capabilities.own_retention if "retention_ratio" in clients else ()
    return {key: value for key, value in HYPER.get(name, {}).items() if key not in instead}


def batches(kind: type[Method]) -> Options:
    """The batch size under contract, for a method that has batches by default."""
    default = kind.Hyper.model_fields.get("batch_size")
    if default is None or not default.default:
        return {}
    return {"batch_size": OTHER_BATCH_SIZES.get(kind.name, BATCH_SIZE)}


def on_digits(name: str, num_clients: int = 6, width: int = 4, splits: Options | None = None) -> Callable[..., Setup]:
    def make(engine: str = "loop", **options: Any) -> Setup:
        stack_width = options.pop("stack_width", width)
        runtime = {"engine": engine, "stack_width": None if engine == "loop" else stack_width}
        clients = {"count": num_clients, **options.pop("clients", {})}
        options = {"splits": splits, **options} if splits else options
        return prepare(experiment(name, runtime=runtime, clients=clients, **options))

    return make


def on_quadratics(method: Callable[[], Method]) -> Callable[..., Setup]:
    def make(**options: Any) -> Setup:
        made = method()
        if isinstance(made, PeerHalf) or made.capabilities.uses_graph:
            options.setdefault("topology", FullyConnected())
        return quadratic.setup(made, **options)

    return make


VARIANTS: Mapping[str, tuple[str, Options]] = {
    "fedavgm without momentum": ("fedavgm", {"server_momentum": 0.0, "server_lr": 0.5}),
    "fedopt adagrad": ("fedopt", {"server_optimizer": "adagrad", "second_moment": "raw"}),
    "fedopt yogi": ("fedopt", {"server_optimizer": "yogi", "weighting": "uniform"}),
    "fedsgd of minibatches": ("fedsgd", {"batch_size": 2, "weighting": "uniform"}),
    "fedscr cut both ways": ("fedscr", {"keep_ratio": 0.4, "downlink": "structured"}),
    "fedpse whose absent fall behind": ("fedpse", {"absent": "nothing", "keep_ratio": 0.5}),
    "fedpse that keeps Adam": (
        "fedpse",
        # All entries, as Adam's first steps are nearly of one size, so that rounding would choose the largest.
        {"optimizer": "adam", "lr": 0.02, "batch_size": 2, "keep_optimizer": True, "keep_ratio": 1.0},
    ),
    "mixture_admm in closed form": ("mixture_admm", {"x_step": "closed_form", "damping": 0.2, "cg_iterations": 4}),
    "dpsgd masked": ("dpsgd", {"density": 0.5, "momentum": 0.5}),
    "ind_weipru soft": ("ind_weipru", {"lr": 0.1, "hard": False}),
    "par_weipru soft": ("par_weipru", {"lr": 0.1, "hard": False}),
    "mcepl as its authors' code": ("mcepl", {"fc_retention_ratio": 0.9, "fil": 0, "lasso": 0.0, "weight_decay": 5e-4}),
    **{f"perfedavg {v}": ("perfedavg", {"batch_size": 2, "steps": 3, "variant": v}) for v in ("fo", "exact")},
    "fedspeed of both gradients": ("fedspeed", {"alpha": 0.4, "rho": 0.5, "batch_size": 2}),
    "mimelite adam": ("mimelite", {"statistics": "adam", "epsilon": 0.1, "batch_size": 2}),
    "scaffold option I": ("scaffold", {"option": "I", "batch_size": 2, "weighting": "samples"}),
}
"""Settings, on quadratics, in which a method does something else than by default."""


def seam(kind: type[Method], make: Callable[[], Method]) -> Case:
    return Case(f"seam {kind.__name__}", on_quadratics(make), len(quadratic.TRAIN), kind)


def on_quadratic(kind: type[Method], hyper: Options) -> Method:
    return kind(quadratic.Quadratic(), kind.Hyper(**hyper))


def variant(label: str, name: str, hyper: Options) -> Case:
    kind = find(Method, name)
    return Case(label, on_quadratics(lambda: on_quadratic(kind, hyper)), len(quadratic.TRAIN), kind)


REGISTERED = [
    Case(name, on_digits(name, count := NUM_CLIENTS.get(name, 4), count - 1, FEW_EXAMPLES), count, kind)
    for name, kind in named(Method).items()
]
SEAMS = [
    seam(DisPFL, lambda: on_quadratic(DisPFL, {"batch_size": 2})),
    seam(Elastic, lambda: Elastic(on_quadratic(Scaffold, {"batch_size": 2}), Elastic.Hyper(batch_size=2))),
]
VARIED = [variant(label, name, hyper) for label, (name, hyper) in VARIANTS.items()]
CASES = [*REGISTERED, *SEAMS, *VARIED]
PARTIAL_CASES = [case for case in CASES if not case.kind.capabilities.needs_everyone]
SERVER_CASES = [case for case in CASES if issubclass(case.kind, ServerHalf)]
FREE_CASES = [case for case in CASES if not case.kind.capabilities.own_compression]
# What peers send is uplink.
FREE_DOWNLINKS = [
    case
    for case in FREE_CASES
    # A wrapper's class does not know what the method inside sends.
    if case in SERVER_CASES
    and (issubclass(case.kind, Wrapping) or "downlink" not in case.kind.unused(case.kind.Hyper()))
]


def with_two_unseen(case: Case) -> Callable[..., Setup]:
    """Makes setups in which `clients.unseen = 0.3` is two clients, so that one could be mistaken for the other."""
    return on_digits(case.name) if case in REGISTERED else case.make


@functools.cache
def played(case: Case) -> tuple[Setup, list[RoundRecord], list[RunState]]:
    """The setup of a case as it is by default, its records and the state after each round, played once."""
    setup = case.make()
    return setup, *play(setup)


def cases(chosen: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


every_method = cases(CASES)
every_server_method = cases(SERVER_CASES)
