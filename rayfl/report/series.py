"""The numbers behind a report: a run's records as one value a round, and the seeds of an experiment as one group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from rayfl.choices import plugins
from rayfl.experiment.identity import determining_settings
from rayfl.run_directory.record import Run

MEGABYTE_BITS = 8e6
"""1 MB = 1e6 bytes."""
PERSONAL = frozenset(
    [
        "avr_weipru",
        "dfedu",
        "dispfl",
        "ditto",
        "dpsgd",
        "dpsgd_ft",
        "dsgdprox",
        "easgd",
        "fedavg_ft",
        "fedfomo",
        "fedpse",
        "fedu",
        "ind_mask",
        "ind_weipru",
        "l2gd",
        "local",
        "lottery_dsgd",
        "lotteryfl",
        "mcepl",
        "mixture_admm",
        "par_weipru",
        "perfedavg",
        "pfedmac",
        "pfedme",
        "subfedavg",
    ]
)
"""Our methods whose clients are judged by models of their own, as runs are read without loading the methods."""
_FEW = 3
"""The most settings for which a legend has room."""


@dataclass(frozen=True)
class Series:
    """One value a recorded round: `rounds` [num_rounds] increasing, `values` [num_rounds]."""

    rounds: np.ndarray
    values: np.ndarray

    @property
    def final(self) -> float:
        """The last value."""
        return float(self.values[-1])

    @property
    def best(self) -> tuple[float, int]:
        """The largest value and the first round that has it; the last one where all are NaN."""
        index = -1 if np.isnan(self.values).all() else int(np.nanargmax(self.values))
        return float(self.values[index]), int(self.rounds[index])


@dataclass(frozen=True)
class Spread:
    """The spread of a value over clients: quantiles 0.1, 0.25, 0.5, 0.75, 0.9 [5, num_rounds], and its last."""

    rounds: np.ndarray
    quantiles: np.ndarray
    last: np.ndarray


@dataclass(frozen=True)
class Cost:
    """Cumulative costs at the end of each round: `megabytes` both ways, those up, and `simulated_s`."""

    rounds: np.ndarray
    megabytes: np.ndarray
    uplink_megabytes: np.ndarray
    simulated_s: np.ndarray

    def at(self, rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Megabytes, megabytes up and simulated seconds up to and including each of `rounds`."""
        done = np.searchsorted(self.rounds, rounds, side="right")
        up, both, seconds = (
            np.append(0.0, spent)[done] for spent in (self.uplink_megabytes, self.megabytes, self.simulated_s)
        )
        return both, up, seconds

    def over(self, rounds: np.ndarray) -> dict[str, np.ndarray]:
        """What a value of each of `rounds` can be drawn against, by the keys of `rayfl.report.charts.AXES`."""
        both, up, seconds = self.at(rounds)
        return {"round": rounds, "up": up, "both": both, "time": seconds}


def metric_names(run: Run) -> list[str]:
    """Names of all metrics of the run, in order of first appearance."""
    return run.metrics["name"].unique().to_pylist()


def is_accuracy(name: str) -> bool:
    """Whether the metric is a share of right answers ("pooled/accuracy", "accuracy")."""
    return name.rsplit("/", 1)[-1] == "accuracy"


def series(run: Run, name: str) -> Series | None:
    """The value of each round: as recorded for the round, else the unweighted mean over clients; None without any."""
    rounds, clients, values = _rows(run, name)
    if not len(rounds):
        return None
    of_round = np.unique(rounds[clients < 0])
    # A round's own value stands for it, and its clients' values do not count a second time.
    counted = (clients < 0) | ~np.isin(rounds, of_round)
    unique, inverse = np.unique(rounds[counted], return_inverse=True)
    return Series(unique, np.bincount(inverse, weights=values[counted]) / np.bincount(inverse))


def spread(run: Run, name: str) -> Spread | None:
    """The quantiles over clients; None where no client has a value of its own."""
    rounds, clients, values = _rows(run, name)
    rounds, values = rounds[clients >= 0], values[clients >= 0]
    if not len(rounds):
        return None
    order = np.argsort(rounds, kind="stable")
    unique, starts = np.unique(rounds[order], return_index=True)
    each = np.split(values[order], starts[1:])
    # Where a client has diverged there is no quantile between two that are infinite.
    with np.errstate(invalid="ignore"):
        quantiles = np.stack([np.quantile(of_round, [0.1, 0.25, 0.5, 0.75, 0.9]) for of_round in each], axis=1)
    return Spread(unique, quantiles, each[-1])


def cost(run: Run) -> Cost:
    """Cumulative bytes and simulated time of a run."""
    up, down, seconds = (run.rounds[name].to_numpy() for name in ("uplink_bits", "downlink_bits", "simulated_s"))
    both = np.cumsum((up + down) / MEGABYTE_BITS)
    return Cost(run.rounds["round"].to_numpy(), both, np.cumsum(up / MEGABYTE_BITS), np.cumsum(seconds))


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
    """Whether clients end with models of their own: the run has saved them, or its method, one of ours, makes them."""
    method = run.experiment.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    return name in PERSONAL or any((run.directory / "models").glob("personal*.safetensors"))


def run_name(run: Run) -> str:
    """The experiment's name, else the directory's."""
    return str(run.experiment.get("name") or run.directory.resolve().name)


def run_label(run: Run) -> str:
    """The run's name in legends: the label that a sweep or the user gave it, else its name."""
    return str(run.experiment.get("label") or run_name(run))


@dataclass(frozen=True)
class Group:
    """Runs that share everything but the seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[object]:
        """The seeds, as the experiments give them."""
        return [run.experiment.get("seed") for run in self.runs]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in nothing but seed, name and directory; labels are unique."""
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
    return [replace(group, label=label) for label, group in zip(labels, found, strict=True)]


def _difference(group: Group, namesakes: Sequence[Mapping[str, object]]) -> str:
    """The settings that tell a group from those of the same name: " (convnet2, per_round=10)".

    Nothing where they differ in no setting that all have, or in many.
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


@dataclass(frozen=True)
class Curve:
    """Mean and sample standard deviation over a group's seeds (0 for one), with what each round had cost on average."""

    rounds: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    megabytes: np.ndarray
    uplink_megabytes: np.ndarray
    simulated_s: np.ndarray

    @property
    def over(self) -> dict[str, np.ndarray]:
        """What the curve can be drawn against, by the keys of `rayfl.report.charts.AXES`."""
        return {"round": self.rounds, "up": self.uplink_megabytes, "both": self.megabytes, "time": self.simulated_s}


def curve(group: Group, name: str) -> Curve | None:
    """The metric over the rounds that all runs of the group have; None if one run lacks it or no round is shared."""
    found = [series(run, name) for run in group.runs]
    present = [one for one in found if one is not None]
    if len(present) < len(found):
        return None
    rounds = present[0].rounds
    for one in present[1:]:
        rounds = np.intersect1d(rounds, one.rounds)
    if not len(rounds):
        return None
    values = np.stack([one.values[np.isin(one.rounds, rounds)] for one in present])
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    spent = np.mean([cost(run).at(rounds) for run in group.runs], axis=0)
    return Curve(rounds, values.mean(axis=0), deviation, *spent)


@dataclass(frozen=True)
class Reached:
    """The first recorded round at which a run's accuracy was at least a target, and what it had cost by then."""

    round: int
    megabytes: float
    uplink_megabytes: float
    simulated_s: float


def reached(run: Run, name: str, target: float) -> Reached | None:
    """When the metric `name` first reached `target`; None if it never did."""
    found = series(run, name)
    if found is None or not (found.values >= target).any():
        return None
    first = found.rounds[found.values >= target][:1]
    both, up, seconds = cost(run).at(first)
    return Reached(int(first[0]), float(both[0]), float(up[0]), float(seconds[0]))
