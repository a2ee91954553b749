"""The numbers of one run for a report: a metric as one value per round, its spread over clients, the costs, and the
distance of saved personal models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow.compute as pc
from safetensors import SafetensorError, safe_open

from rayfl.limits.regular_files import require_regular
from rayfl.metrics.facts import Facts
from rayfl.metrics.fairness import facts_over_clients, is_summary
from rayfl.run_directory.record import Run
from rayfl.run_directory.saved_models import CONSTANTS, model_files
from rayfl.untyped import Foreign

if TYPE_CHECKING:
    from rayfl.methods.base import Method

MEGABYTE_BITS = 8e6
"""1 MB = 1e6 bytes."""
COST_TITLES = {
    "round": "Round",
    "total_uplink_megabytes": "Sent up so far, MB",
    "total_megabytes": "Sent up and down so far, MB",
    "total_simulated_s": "Simulated time so far, s",
}
"""The titles of the x axes that show the fields of `Cost`."""
UNREADABLE = (OSError, ValueError, SafetensorError)
"""What `personal_models` raises for a damaged file."""


class Series(NamedTuple):
    """One value per recorded round: `rounds` [num_rounds] increasing, `values` [num_rounds]."""

    rounds: np.ndarray
    values: np.ndarray

    @property
    def final(self) -> float:
        """The last value."""
        return float(self.values[-1])

    def best(self, facts: Facts) -> tuple[float, int]:
        """The best value and the first round that has it; the last round if all values are NaN."""
        index = -1 if np.isnan(self.values).all() else int(np.nanargmax(facts.sign * self.values))
        return float(self.values[index]), int(self.rounds[index])


class Spread(NamedTuple):
    """The spread of a value over clients: quantiles 0.1, 0.25, 0.5, 0.75, 0.9 [5, num_rounds]."""

    rounds: np.ndarray
    quantiles: np.ndarray


class Cost(NamedTuple):
    """What a run had cost by the end of each round: `round`, and the other fields, are [num_rounds]."""

    round: np.ndarray
    total_megabytes: np.ndarray
    total_uplink_megabytes: np.ndarray
    total_simulated_s: np.ndarray

    def at(self, rounds: np.ndarray) -> Cost:
        """The costs up to and including each of `rounds`."""
        done = np.searchsorted(self.round, rounds, side="right")
        return Cost(rounds, *(np.append(0.0, spent)[done] for spent in self[1:]))

    @property
    def axes(self) -> dict[str, np.ndarray]:
        """The rounds and costs by the title of the x axis that shows them."""
        return {title: getattr(self, name) for name, title in COST_TITLES.items()}


def metric_names(run: Run) -> list[str]:
    """Names of all metrics of the run, in order of first appearance."""
    return run.metrics["name"].unique().to_pylist()


def facts(run: Run, name: str) -> Facts:
    """The facts of a value, such as "pooled/accuracy"; without unit, range and direction if no metric makes it."""
    place, _, what = name.partition("/")
    return facts_over_clients(place, run.facts.get(what or place, Facts(title=name)))


def ranking_names(run: Run) -> list[str]:
    """The values by which runs are compared, in the order of the metrics; if none ranks runs, all with a direction.

    Other summaries of clients' values than their mean rank none.
    """
    known = [
        name for name in metric_names(run) if facts(run, name).higher_is_better is not None and not is_summary(name)
    ]
    known.sort(key=lambda name: [*run.facts].index(name.partition("/")[2] or name))
    return [name for name in known if facts(run, name).ranks] or [name for name in known if name != "train/loss"]


def series(run: Run, name: str) -> Series | None:
    """The value of each round: that of the round itself, else the unweighted mean over clients; None without values."""
    rounds, clients, values = _rows(run, name)
    if not len(rounds):
        return None
    # If a round has a value of its own, the values of its clients do not count.
    counted = (clients < 0) | ~np.isin(rounds, rounds[clients < 0])
    unique, inverse = np.unique(rounds[counted], return_inverse=True)
    return Series(unique, np.bincount(inverse, weights=values[counted]) / np.bincount(inverse))


def spread(run: Run, name: str) -> Spread | None:
    """The quantiles over clients; None if no client has a value of its own."""
    rounds, clients, values = _rows(run, name)
    rounds, values = rounds[clients >= 0], values[clients >= 0]
    if not len(rounds):
        return None
    unique, starts = np.unique(rounds, return_index=True)
    # If clients have diverged, numpy warns of quantiles between infinite values.
    with np.errstate(invalid="ignore"):
        quantiles = np.stack(
            [np.quantile(of_round, [0.1, 0.25, 0.5, 0.75, 0.9]) for of_round in np.split(values, starts[1:])], axis=1
        )
    return Spread(unique, quantiles)


def last_of_clients(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Clients and their values at their last evaluation; empty if no client has a value of its own."""
    rounds, clients, values = _rows(run, name)
    chosen = (clients >= 0) & (rounds == rounds[clients >= 0].max(initial=-1))
    return clients[chosen], values[chosen]


def _rows(run: Run, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, clients (-1 for null) and defined values of one metric; rounds are recorded in their order."""
    rows = run.metrics.filter((pc.field("name") == name) & pc.field("value").is_valid())
    return rows["round"].to_numpy(), rows["client"].fill_null(-1).to_numpy(), rows["value"].to_numpy()


def cost(run: Run) -> Cost:
    """The costs of a run by the end of each recorded round."""
    up, down, seconds = (run.rounds[name].to_numpy() for name in ("uplink_bits", "downlink_bits", "simulated_s"))
    both, up = (np.cumsum(bits / MEGABYTE_BITS) for bits in (up + down, up))
    return Cost(run.rounds["round"].to_numpy(), both, up, np.cumsum(seconds))


def total(run: Run, column: str, unit: float = 1.0) -> float:
    """The sum of a column of the rounds table over all rounds."""
    return float(run.rounds[column].to_numpy().sum() / unit)


def workers(run: Run) -> float:
    """The mean number of clients that worked in a round."""
    return np.count_nonzero(run.clients["num_samples"].to_numpy()) / max(len(run.rounds), 1)


def mean_over(run: Run, column: str, having: str) -> float:
    """The mean of a column of the clients table over its rows with a positive number in the column `having`."""
    amounts = run.clients.filter(pc.field(having) > 0)[column].to_numpy()
    return float(amounts.mean()) if len(amounts) else 0.0


def is_personal(run: Run) -> bool:
    """Whether clients end with models of their own: the run has saved some, or its method is one of ours that makes
    or fine-tunes them."""
    if model_files(run.directory, "personal"):
        return True
    # The methods load torch, which most tables do without.
    from rayfl.methods.base import Method

    method = method_of(run)
    return method is not None and (method.capabilities.personalized or method.eval_stages is not Method.eval_stages)


def method_of(run: Run) -> type[Method] | None:
    """The class of the run's method, if it is one of ours; no code of a run directory is imported."""
    from rayfl.choices.kinds import named
    from rayfl.methods.base import Method

    return named(Method).get(table_name(run, "method"))


def table_name(run: Run, table: str) -> str:
    """The name in a table of the experiment: "ditto" for method = "ditto" and method.name = "ditto"; "" without one."""
    value = run.experiment.get(table)
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else ""


def run_name(run: Run) -> str:
    """The experiment's name, else the directory's."""
    return str(run.experiment.get("name") or run.directory.resolve().name)


def run_label(run: Run) -> str:
    """The run's name in legends: the label that a sweep or the user gave it, else its name."""
    return str(run.experiment.get("label") or run_name(run))


@contextmanager
def personal_models(run: Run, first_file: bool = False) -> Iterator[dict[str, Foreign]]:
    """Context manager: the open file of each tensor of the saved personal models, by its name: CLIENT/NAME.

    first_file: only those of the first clients.
    """
    with ExitStack() as opened:
        files = {}
        for path in model_files(run.directory, "personal")[: 1 if first_file else None]:
            require_regular(path)
            models = opened.enter_context(safe_open(path, "numpy"))
            files |= dict.fromkeys(models.keys(), models)
        yield files


def shape_of(files: Mapping[str, Foreign], name: str) -> tuple[int, ...]:
    """The shape of a tensor of `personal_models`."""
    return tuple(files[name].get_slice(name).get_shape())


def tensor_of(files: Mapping[str, Foreign], name: str) -> np.ndarray:
    """A tensor of `personal_models`."""
    return files[name].get_tensor(name)


def consensus_distance(run: Run) -> float:
    """The root of (1/n) sum_i ||x_i - x||^2 over the n saved personal models x_i, with x their mean (Kong et al., ICML
    2021); NaN if fewer than two are saved, or if they have unlike parameters.

    Parameters that all clients share are saved once, and add nothing. A damaged file counts as missing.
    """
    squares = 0.0
    try:
        with personal_models(run) as files:
            personal = [key for key in files if not key.startswith(f"{CONSTANTS}/")]
            clients = dict.fromkeys(key.partition("/")[0] for key in personal)
            shapes = dict.fromkeys((key.partition("/")[2], shape_of(files, key)) for key in personal)
            if len(clients) < 2 or len(personal) != len(clients) * len(shapes):
                return np.nan
            for name, shape in shapes:
                summed = np.zeros(shape)
                for client in clients:
                    values = tensor_of(files, f"{client}/{name}").astype(np.float64)
                    summed += values
                    squares += float(np.square(values).sum()) / len(clients)
                squares -= float(np.square(summed / len(clients)).sum())
    except UNREADABLE:
        return np.nan
    return float(np.sqrt(max(0.0, squares)))
