"""A run in numbers, as they are printed at its end. Nothing here draws."""

from typing import TypedDict

from rayfl.report.fairness import of_run
from rayfl.report.series import MEGABYTE_BITS, facts, ranking_names, run_name, series, work_done
from rayfl.run_directory.record import Run


class Summary(TypedDict):
    """Plain values, by name, for a table or for JSON.

    `final`, `best` (the value, and the first round that had it) and `units` ("%": a share of 1) are keyed by the names
    of the metrics that rank runs, `fairness` (`metrics.fairness.fairness` at the last evaluation) by those of all
    values of single clients; `privacy` has epsilon of all rounds, and delta. Megabytes are totals over clients and
    rounds; kilobytes are means over the clients and rounds that sent (received) anything, steps and examples over
    those that worked, in all stages; 1 MB = 1e6 B.
    """

    name: str
    directory: str
    finished: bool
    rounds: int
    final: dict[str, float]
    best: dict[str, dict[str, float]]
    units: dict[str, str]
    fairness: dict[str, dict[str, float]]
    privacy: dict[str, float]
    uplink_megabytes: float
    downlink_megabytes: float
    uplink_kilobytes_per_client_round: float
    downlink_kilobytes_per_client_round: float
    clients_per_round: float
    steps_per_client_round: float
    examples_per_client_round: float
    selected: int
    delivered: int
    simulated_s: float
    wall_s: float


def summary(run: Run) -> Summary:
    """A run in numbers."""
    ranked = {name: found for name in ranking_names(run) if (found := series(run, name))}
    best = ((name, *found.best(facts(run, name))) for name, found in ranked.items())
    wrap, spent = run.experiment.get("wrap"), series(run, "privacy/epsilon")
    deltas = [one["delta"] for one in wrap if "delta" in one] if isinstance(wrap, list) else []
    done = work_done(run)
    totals = {name: float(run.rounds[name].to_numpy().sum()) for name in run.rounds.column_names}
    return {
        "name": run_name(run),
        "directory": str(run.directory.absolute()),
        "finished": run.finished,
        "rounds": len(run.rounds),
        "final": {name: found.final for name, found in ranked.items()},
        "best": {name: {"value": value, "round": round} for name, value, round in best},
        "units": {name: facts(run, name).unit for name in ranked},
        "fairness": of_run(run),
        "privacy": {"epsilon": spent.final, "delta": deltas[-1]} if spent and deltas else {},
        "uplink_megabytes": totals["uplink_bits"] / MEGABYTE_BITS,
        "downlink_megabytes": totals["downlink_bits"] / MEGABYTE_BITS,
        "uplink_kilobytes_per_client_round": _mean_kilobytes(run, "uplink_bits"),
        "downlink_kilobytes_per_client_round": _mean_kilobytes(run, "downlink_bits"),
        "clients_per_round": done.clients,
        "steps_per_client_round": done.steps,
        "examples_per_client_round": done.examples,
        "selected": int(totals["selected"]),
        "delivered": int(totals["delivered"]),
        "simulated_s": totals["simulated_s"],
        "wall_s": totals["wall_s"],
    }


def _mean_kilobytes(run: Run, column: str) -> float:
    bits = run.clients[column].to_numpy()
    return float(bits[bits > 0].mean()) / 8e3 if (bits > 0).any() else 0.0
