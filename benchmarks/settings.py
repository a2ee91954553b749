"""The benchmark `settings`: gives every method every setting, and says which pairs change a run, are refused, or
change nothing and say nothing.

Each pair is a run of two rounds on a half of digits, compared bit for bit with the method's plain run: its records
but for the wall clock, its states and its memories.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from rayfl.determinism.process import prepare_process

prepare_process()

from pydantic.fields import FieldInfo  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.figures import Column, Figures, Results  # noqa: E402
from rayfl.choices.kinds import find, named  # noqa: E402
from rayfl.errors import RayflError, did_you_mean  # noqa: E402
from rayfl.experiment.experiment import Experiment  # noqa: E402
from rayfl.experiment.prepare import prepare  # noqa: E402
from rayfl.experiment.table import put  # noqa: E402
from rayfl.methods.base import Method, PeerHalf  # noqa: E402
from rayfl.rounds.executor import InlineExecutor  # noqa: E402
from rayfl.testing.executors import (  # noqa: E402
    contents,
    play,
    rows,
)

CHANGED, REFUSED, SILENT, FAILED = "changed", "refused", "silent", "failed"
COLUMNS = tuple(Column(name, name) for name in ("method", "setting", "value", "found", "words"))

SPEEDS = [150.0, 300.0, 600.0, 1000.0, 1500.0, 2000.0]
"""Examples a second of the six clients; unequal, so that `clients.work` and `clients.deadline_s` have an effect."""

# Any: values of settings.
SETTINGS: Mapping[str, Sequence[Any]] = {
    "seed": [2],
    "rounds": [3],
    "partition.alpha": [0.3],
    "model.hidden": [[8]],
    "model.memory_format": ["channels_last"],
    "clients.count": [5],
    "clients.per_round": [3],
    "clients.fraction": [0.5],
    "clients.dropout_before_download": [0.5],
    "clients.dropout_after_download": [0.5],
    "clients.dropout_after_training": [0.5],
    "clients.upload_loss": [0.5],
    "clients.availability": [{"probability": 0.5}],
    "clients.retention_ratio": [[0.2, 0.5]],
    "clients.examples_per_s": [100.0],
    "clients.sparse_speedup": [True],
    "clients.uplink_mbps": [0.1],
    "clients.downlink_mbps": [0.1],
    "clients.deadline_s": [0.1, 0.3],
    "clients.take_first": [3],
    "clients.work": ["capacity"],
    "uplink": [{"name": "topk", "keep_ratio": 0.2}, {"name": "randk"}],
    "downlink": [{"name": "qsgd"}, {"name": "dense", "dtype": "fp16"}],
    "topology": ["fully-connected"],
    "topology.weights": ["metropolis"],
    "splits.validation_ratio": [0.25],
    "splits.heldout_ratio": [0.4],
    "evaluation.every": [0],
    "evaluation.pooled": [False],
    "evaluation.own": [False],
    "evaluation.personal_on_pooled": [True],
    "evaluation.clients": [2],
    "evaluation.train": [True],
    "evaluation.masks": [True],
    "runtime.precision": ["bf16"],
    "wrap": ["elastic"],
}
"""Settings outside `[method]`, with values that are tried until one changes the run."""

METHODS: Mapping[str, Mapping[str, Any]] = {
    "subfedavg": {"min_accuracy": 0.05, "prune_ratio": 0.3, "epochs": 2, "lr": 0.1},
    "lotteryfl": {"min_accuracy": 0.05, "epochs": 2, "lr": 0.1},
    "lottery_dsgd": {"min_accuracy": 0.05, "lr": 0.1},
    "l2gd": {"p": 0.5},
    "fedpd": {"skip_probability": 0.3},
    "fedfomo": {"num_candidates": 3},
    # The rule's two sides are then about equal: L^2 against xi / lr^2.
    "lag_ps": {"smoothness": 6.0},
    # A smaller rho lets Newton's steps on this model, which is not convex, run away.
    "mixture_admm": {"rho": 5.0},
    # Networks that start alike match neuron by neuron, and the mean of matched neurons does not depend on the prior.
    "pfnm": {"independent_start": True, "estimate": "posterior"},
    **{name: {"fil": 40, "fil_share": 1.0} for name in ("avr_weipru", "ind_mask", "ind_weipru", "mcepl", "par_weipru")},
}
"""Settings of methods without which others would have no effect in two rounds (a gate, a coin, thin filters)."""
TABLES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"uplink": "natural"} for name in ("adiana", "diana", "marina")},
    # Only what is sent can be late: clients that exchange do not train.
    "l2gd": {"rounds": 4, "clients": {"count": 6, "examples_per_s": SPEEDS, "uplink_mbps": 0.1}},
    "stem": {"rounds": 4},
}
"""Settings outside `[method]`, of methods that are exact without a compressor, or do not exchange in two rounds, or
have no second step of a schedule there."""
# Any: values of settings.
VALUES: Mapping[str, Mapping[str, Sequence[Any]]] = {"mixture_admm": {"mu": [1e-4]}}
"""Values of methods' settings in place of `values`: `mu` only checks others, so a value that they do not fit."""


def bench_settings(methods: Sequence[str], results: Results, limit_s: float | None) -> int:
    """Try all pairs of these methods, by default of all, and print those that are silent. 1 if there are any.

    Methods that the JSON file has already are not tried again. After `limit_s` seconds no further method begins.
    """
    for name in methods:
        if name not in named(Method):
            raise RayflError(f"there is no method {name!r}: {did_you_mean(name, named(Method))}")
    results.require()
    begun, figures = time.monotonic(), Figures("pairs", COLUMNS)
    if results.path.exists() and not results.overwrite:
        figures.rows += json.loads(results.path.read_text())["pairs"]
    done = {row["method"] for row in figures.rows}
    for name in sorted(methods or named(Method)):
        if name in done or (limit_s is not None and time.monotonic() - begun > limit_s):
            continue
        for setting, value, effect, words in pairs(name):
            figures.add(name, setting, value, effect, words)
        print(f"{name}: {counted(row for row in figures.rows if row['method'] == name)}", flush=True)
        results.write(figures)
    wrong = Figures("wrong", COLUMNS, rows=[row for row in figures.rows if row["found"] in (SILENT, FAILED)])
    Console().print(wrong.table())
    print(
        f"{len(figures.rows)} pairs of {len({row['method'] for row in figures.rows})} methods: {counted(figures.rows)}"
    )
    return int(bool(wrong.rows))


# Any: rows of figures.
def counted(rows: Any) -> str:
    """The number of pairs of each kind, in words."""
    number = Counter(row["found"] for row in rows)
    return ", ".join(f"{number[kind]} {kind}" for kind in (CHANGED, REFUSED, SILENT, FAILED))


# Any: values of settings.
def pairs(name: str) -> Iterator[tuple[str, Any, str, str]]:
    """Each setting with a method: the last value tried, what it does, and the sentence of a refusal."""
    kind = find(Method, name)
    plain = played(tables(name))
    hyper_settings = {
        f"method.{key}": VALUES.get(name, {}).get(key) or values(field, METHODS.get(name, {}).get(key))
        for key, field in kind.Hyper.model_fields.items()
    }
    for setting, tried in {**SETTINGS, **hyper_settings}.items():
        if setting == "evaluation.pooled" and "pooled/accuracy" not in plain[0]:
            # There is no global model whose evaluation could be left out.
            continue
        value, effect, words = None, REFUSED, ""
        for value in tried:
            given = tables(name)
            put(given, setting.split("."), value, setting)
            try:
                effect, words = (CHANGED if played(given) != plain else SILENT), ""
            except RayflError as error:
                # A value that is out of range says nothing of the setting.
                words = words or str(error)
            except Exception as error:  # noqa: BLE001 (any other error is a finding)
                effect, words = FAILED, f"{type(error).__name__}: {error}"
            if effect in (CHANGED, FAILED):
                break
        yield setting, value, effect, "" if effect == SILENT else words


# Any: tables of an experiment, and what a run leaves behind.
def tables(name: str) -> dict[str, Any]:
    """The plain experiment with a method."""
    kind = find(Method, name)
    table: dict[str, Any] = {
        "rounds": 2,
        "seed": 3,
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 1.0},
        "model": {"name": "mlp", "hidden": [12]},
        "clients": {"count": 6, "examples_per_s": SPEEDS},
        "splits": {"heldout_ratio": 0.5},
        "method": {"name": name, **METHODS.get(name, {})},
        "runtime": {"executor": "inline", "engine": "loop"},
        **TABLES.get(name, {}),
    }
    can = kind.capabilities
    if can.uses_graph or (kind.gather and issubclass(kind, PeerHalf)):
        table["topology"] = {"name": "erdos-renyi", "p": 0.6}
    if can.in_pairs:
        table["schedule"] = {"name": "gossip", "partners": 1}
    return table


def played(given: Mapping[str, Any]) -> Any:
    """All that a run leaves behind, comparable."""
    setup = prepare(Experiment(**given))
    executor = InlineExecutor(setup)
    records, run_states = play(setup, executor)
    arrays = contents(executor, run_states[-1])
    return repr(rows(records)), {place: (str(array.dtype), array.tobytes()) for place, array in arrays.items()}


def values(field: FieldInfo, base: Any) -> list[Any]:
    """Values of a method's setting that differ from the plain run's."""
    now = field.get_default(call_default_factory=True) if base is None else base
    kinds = [part for kind in (field.annotation, *get_args(field.annotation)) for part in (kind, *get_args(kind))]
    if literal := next((kind for kind in kinds if get_origin(kind) is Literal), None):
        return [choice for choice in get_args(literal) if choice != now]
    if bool in kinds:
        return [not now]
    if int in kinds and float not in kinds:
        return [value for value in ((now or 2) + 1, 3, 2, 1, 0, 10) if value != now]
    return [value for value in (0.5 * (now or 1.0), 2.0 * (now or 1.0), 0.9, 0.25, 0.01, 3.0) if value != now]
