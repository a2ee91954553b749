"""The numbers behind a report: a run's records as one value a round, and the seeds of an experiment as one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rayfl.choices import plugins
from rayfl.experiment.identity import determining_settings
from rayfl.run_directory.record import Run

if TYPE_CHECKING:
    from rayfl.methods.base import Method

MEGABYTE_BITS = 8e6
"""1 MB = 1e6 bytes."""
_FEW = 3
"""The most settings that a label names."""


class Series(NamedTuple):
    """One value per recorded round: `rounds` [num_rounds] increasing, `values` [num_rounds]."""

    rounds: np.ndarray
    values: np.ndarray

    @property
    def final(self) -> float:
        """The last value."""
        return float(self.values[-1])

    @property
    def best(self) -> tuple[float, int]:
        """The largest value and the first round that has it; the last round if all values are NaN."""
        index = -1 if np.isnan(self.values).all() else int(np.nanargmax(self.values))
        return float(self.values[index]), int(self.rounds[index])


class Spread(NamedTuple):
    """The spread of a value over clients: quantiles 0.1, 0.25, 0.5, 0.75, 0.9 [5, num_rounds], and the last values."""

    rounds: np.ndarray
    quantiles: np.ndarray
    last: np.ndarray


class Cost(NamedTuple):
    """What a run had cost by the end of each of `rounds`: megabytes up, megabytes both ways, simulated seconds."""

    rounds: np.ndarray
    uplink_megabytes: np.ndarray
    megabytes: np.ndarray
    simulated_s: np.ndarray

    def at(self, rounds: np.ndarray) -> Cost:
        """The costs up to and including each of `rounds`."""
        done = np.searchsorted(self.rounds, rounds, side="right")
        return Cost(rounds, *(np.append(0.0, spent)[done] for spent in self[1:]))

    @property
    def axes(self) -> dict[str, np.ndarray]:
        """The rounds and costs by the title of the x axis that shows them."""
        return dict(zip(_AXES, self, strict=True))


_AXES = ("Round", "Sent up so far, MB", "Sent up and down so far, MB", "Simulated time so far, s")


def metric_names(run: Run) -> list[str]:
    """Names of all metrics of the run, in order of first appearance."""
    return run.metrics["name"].unique().to_pylist()


def is_accuracy(name: str) -> bool:
    """Whether the metric is a share of right answers ("pooled/accuracy", "accuracy")."""
    return name.rsplit("/", 1)[-1] == "accuracy"


def series(run: Run, name: str) -> Series | None:
    """The value of each round: that of the round itself, else the unweighted mean over clients; None without values."""
    rounds, clients, values = _rows(run, name)
    if not len(rounds):
        return None
    of_round = np.unique(rounds[clients < 0])
    # If a round has a value of its own, the values of its clients do not count.
    counted = (clients < 0) | ~np.isin(rounds, of_round)
    unique, inverse = np.unique(rounds[counted], return_inverse=True)
    return Series(unique, np.bincount(inverse, weights=values[counted]) / np.bincount(inverse))


def spread(run: Run, name: str) -> Spread | None:
    """The quantiles over clients; None if no client has a value of its own."""
    rounds, clients, values = _rows(run, name)
    rounds, values = rounds[clients >= 0], values[clients >= 0]
    if not len(rounds):
        return None
    order = np.argsort(rounds, kind="stable")
    unique, starts = np.unique(rounds[order], return_index=True)
    each = np.split(values[order], starts[1:])
    # If clients have diverged, numpy warns of quantiles between infinite values.
    with np.errstate(invalid="ignore"):
        quantiles = np.stack([np.quantile(of_round, [0.1, 0.25, 0.5, 0.75, 0.9]) for of_round in each], axis=1)
    return Spread(unique, quantiles, each[-1])


def last_of_clients(group: Group, name: str) -> np.ndarray:
    """The clients' values at the last evaluation of each run of the group; empty if no client has one."""
    found = [spread(run, name) for run in group.runs]
    return np.concatenate([np.empty(0), *(one.last for one in found if one is not None)])


def cost(run: Run) -> Cost:
    """The costs of a run by the end of each recorded round."""
    up, down, seconds = (run.rounds[name].to_numpy() for name in ("uplink_bits", "downlink_bits", "simulated_s"))
    both = np.cumsum((up + down) / MEGABYTE_BITS)
    return Cost(run.rounds["round"].to_numpy(), np.cumsum(up / MEGABYTE_BITS), both, np.cumsum(seconds))


def _rows(run: Run, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, clients (-1 for null) and values of one metric."""
    words = run.metrics["name"].combine_chunks()
    known = words.dictionary.to_pylist()
    if name not in known:
        nothing = np.empty(0)
        return nothing, nothing, nothing
    wanted = words.indices.to_numpy() == known.index(name)
    clients = run.metrics["client"].fill_null(-1).to_numpy()
    return run.metrics["round"].to_numpy()[wanted], clients[wanted], run.metrics["value"].to_numpy()[wanted]


def is_personal(run: Run) -> bool:
    """Whether clients end with models of their own: the run has saved some, or its method is one of ours that makes
    or fine-tunes them."""
    if any((run.directory / "models").glob("personal*.safetensors")):
        return True
    # The methods load torch, which most tables do without.
    from rayfl.methods.base import Method

    found = method_of(run)
    return found is not None and (found.personalized or found.eval_stages is not Method.eval_stages)


def method_of(run: Run) -> type[Method] | None:
    """The class of the run's method, if it is one of ours; no code of a run directory is imported."""
    from rayfl.choices.kinds import named
    from rayfl.methods.base import Method

    method = run.experiment.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    return named(Method).get(name) if isinstance(name, str) else None


def run_name(run: Run) -> str:
    """The experiment's name, else the directory's."""
    return str(run.experiment.get("name") or run.directory.resolve().name)


def run_label(run: Run) -> str:
    """The run's name in legends: the label that a sweep or the user gave it, else its name."""
    return str(run.experiment.get("label") or run_name(run))


class Group(NamedTuple):
    """Runs with the same `identity.determining_settings` and different seeds."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[object]:
        """The seeds, as the experiments give them."""
        return [run.experiment.get("seed") for run in self.runs]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs with the same `identity.determining_settings` and different seeds; labels are unique."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        # Two runs of one seed are two runs, not two draws: the second starts a group of its own.
        key = repr(sorted(determining_settings(run.experiment).items()))
        while any(other.experiment.get("seed") == run.experiment.get("seed") for other in together.get(key, ())):
            key += "'"
        together.setdefault(key, []).append(run)
    found = [Group(_shared_name([run_label(run) for run in members]), tuple(members)) for members in together.values()]
    labels: list[str] = []
    for group in found:
        namesakes = [determining_settings(other.runs[0].experiment) for other in found if other.label == group.label]
        label = group.label + (_difference(group, namesakes) if len(namesakes) > 1 else "")
        if label in labels:
            label = f"{group.label} ({group.runs[0].directory.name})"
        while label in labels:
            label += "'"
        labels.append(label)
    return [group._replace(label=label) for label, group in zip(labels, found, strict=True)]


def _difference(group: Group, namesakes: Sequence[Mapping[str, object]]) -> str:
    """The settings that tell a group from others of the same name: " (convnet2, per_round=10)".

    "" if they differ in no setting that all have, or in more than three.
    """
    own = determining_settings(group.runs[0].experiment)
    shared = [key for key in own if all(key in other for other in namesakes)]
    keys = [key for key in shared if any(other[key] != own[key] for other in namesakes)]
    words = [
        plugins.short(str(own[key])) if key.endswith(".name") else f"{key.rpartition('.')[2]}={own[key]}"
        for key in keys
    ]
    return f" ({', '.join(words)})" if 0 < len(keys) <= _FEW else ""


def _shared_name(names: Sequence[str]) -> str:
    """ "fedpse" for "fedpse-seed1" and "fedpse-seed2"."""
    if len(set(names)) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in same).rstrip("0123456789-_ ./=")
    return shared.removesuffix("seed").rstrip("-_ ./=") or names[0]


class Curve(NamedTuple):
    """Mean and sample standard deviation over a group's seeds (0 for one seed), with the mean cost by each round."""

    cost: Cost
    mean: np.ndarray
    deviation: np.ndarray


def curve(group: Group, name: str) -> Curve | None:
    """The metric over the rounds that all runs of the group have; None if a run lacks it or they share no round."""
    found = [series(run, name) for run in group.runs]
    present = [one for one in found if one is not None]
    if len(present) < len(found):
        return None
    rounds = reduce(np.intersect1d, [one.rounds for one in present])
    if not len(rounds):
        return None
    values = np.stack([one.values[np.isin(one.rounds, rounds)] for one in present])
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    spent = np.mean([cost(run).at(rounds)[1:] for run in group.runs], axis=0)
    return Curve(Cost(rounds, *spent), values.mean(axis=0), deviation)
