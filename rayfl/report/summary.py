"""Runs in numbers and as plain text, as a terminal shows them: one run, runs side by side, and the runs of a folder.

Nothing here draws, and nothing in a folder is changed.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

import pyarrow.compute as pc

from rayfl import toml
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.identity import require_settings
from rayfl.experiment.report_options import ReportOptions, require_targets
from rayfl.report import wording
from rayfl.report.groups import Group, best_first, compared, facts_of, group_runs, has_seeds, ranked_names
from rayfl.report.numbers import (
    SPENT,
    WORKED,
    cost_columns,
    costs_to_target,
    further_columns,
    number,
    target_words,
)
from rayfl.report.page_tables import (
    Column,
    TextTable,
    differing,
    fairness_of,
    fairness_tables,
    metric_column,
    run_columns,
)
from rayfl.report.series import MEGABYTE_BITS, facts, mean_over, ranking_names, run_name, series, total, workers
from rayfl.rounds.early_stop import EarlyStop, stop_rule
from rayfl.run_directory.description import Notes, read_experiment, read_notes, read_resources
from rayfl.run_directory.disk import is_locked
from rayfl.run_directory.record import Run, read_run
from rayfl.settings import dotted
from rayfl.untyped import Json

Summary = dict[str, Json]
"""The numbers of a run by name, as `summary` lists them."""
RunStatus = Literal["finished", "running", "stopped", "unfinished", "damaged"]
"""`unfinished`: a copy in object storage, which does not say whether a process is continuing the run."""
PLACES = ("pooled", "own", "unseen")
"""The models that a list of runs shows: the global one, the clients', and those of clients that no round asks."""
_DEPTH = 3
"""The depth of folders in which runs are looked for: runs/SWEEP/RUN."""
_MOST_DIFFERENCES = 12
"""The most differing settings that a terminal shows."""
_MOST_RUNS = 6
"""The most runs whose settings fit side by side into a terminal."""


def run_list(folder: Path, where: Mapping[str, str]) -> TextTable:
    """All runs in a folder and in the folders below, a row each, the latest first.

    Name, state, rounds, the last value in each of `PLACES` where models are evaluated, by the first metric that ranks
    runs, when the run last recorded anything, and if any run has them, tags and note. where: the values that listed
    runs have, as text by key: `state`, `tag`, or a setting by its dotted key (method for method.name).
    """
    rows = []
    for changed, run in sorted(((_last_change(run), run) for run in runs_below(folder)), reverse=True):
        state, *values = _overview(run)
        notes = read_notes(run)
        if fits(run, state, notes, where):
            name = run.name if run == folder else run.relative_to(folder).as_posix()
            time = datetime.fromtimestamp(changed).isoformat(" ", "minutes")
            rows.append([name, state, *values, time, " ".join(notes.tags), notes.note])
    heads = ["run", "state", "rounds", *PLACES, "changed", "tags", "note"]
    width = len(heads) if any(row[-1] or row[-2] for row in rows) else -2
    return TextTable(heads[:width], [row[:width] for row in rows])


def runs_below(folder: Path) -> list[Path]:
    """The directories of the runs in a folder and in the folders below, or the folder itself if it is one."""
    paths = [path for depth in range(_DEPTH + 1) for path in sorted(folder.glob("*/" * depth + "experiment.json"))]
    return [path.parent for path in paths if path.is_file() and not path.parent.is_symlink()]


def fits(directory: Path, state: str, notes: Notes, where: Mapping[str, str]) -> bool:
    """Whether a run has all the values in `where`, as of `run_list`."""
    settings = {}
    with suppress(RayflError):
        settings = dotted(read_experiment(directory)) if where else {}
    known = {key: {str(value), toml.dumps({"": value}).partition(" = ")[2].strip()} for key, value in settings.items()}
    known |= {key.removesuffix(".name"): values for key, values in known.items() if key.endswith(".name")}
    known |= {"state": {state}, "tag": {*notes.tags}}
    return all(value in known.get(key, ()) for key, value in where.items())


def _overview(directory: Path) -> list[str]:
    """State, rounds and values of a run; one that cannot be read is damaged."""
    try:
        run = read_run(directory, leave_out=("clients",))
    except RayflError:
        return ["damaged", "0/?", *[""] * len(PLACES)]
    what = next((name.partition("/")[2] for name in ranking_names(run) if name.partition("/")[0] in PLACES), "")
    last = (series(run, f"{place}/{what}") for place in PLACES)
    values = ["" if values is None else run.facts[what].words(values.final) for values in last]
    return [state_of(run), f"{len(run.rounds)}/{run.experiment.get('rounds')}", *values]


def state_of(run: Run) -> RunStatus:
    """Whether a run is finished, is running in a process of this machine, or was stopped."""
    return "running" if is_locked(run.directory) else "finished" if run.finished else "stopped"


def early_end(run: Run) -> str:
    """Why a run ended before its last round, by its `[stop]` table and its records; "" if it did not."""
    stop = run.experiment.get("stop")
    if not isinstance(stop, Mapping):
        return ""
    rule = stop_rule(EarlyStop(**stop), run.facts, bool(dotted(run.experiment).get("evaluation.own", True)))
    state = {}
    for value in run.metrics.filter((pc.field("name") == rule.metric) & pc.field("client").is_null())["value"]:
        state = rule.after(state, value.as_py())
    return rule.reason(state)


def _last_change(directory: Path) -> float:
    """When the records or the description of a run last changed, in seconds since 1970; 0 if there are none."""
    changed = [0.0]
    for path in (directory / "experiment.json", *(directory / "records").glob("*")):
        # A recorder may remove a file meanwhile.
        with suppress(OSError):
            changed.append(path.stat().st_mtime)
    return max(changed)


def summary(run: Run) -> Summary:
    """A run in numbers: plain values by name, for a table or for JSON.

    name, directory, finished, rounds (their number), early_stop (why a `[stop]` table ended the run, or ""). final,
    best (the value, and the first round that had it) and units ("%": a share of 1) have the names of the metrics that
    rank runs, fairness (`metrics.fairness.fairness` at the last evaluation) those of all values of single clients;
    privacy has epsilon of all rounds, and delta. uplink_megabytes, downlink_megabytes, selected, delivered, simulated_s
    and wall_s are totals over clients and rounds; uplink_kilobytes_per_client_round and its like for downlinks are
    means over the clients and rounds that sent (received) anything, clients_per_round, steps_per_client_round and
    examples_per_client_round over those that worked, in all stages; 1 MB = 1e6 B. resources: as of
    `rounds.resources.totals`.
    """
    ranked = {name: values for name in ranking_names(run) if (values := series(run, name))}
    best = ((name, *values.best(facts(run, name))) for name, values in ranked.items())
    wrap = run.experiment.get("wrap")
    spent = series(run, "privacy/epsilon")
    deltas = [wrapper["delta"] for wrapper in wrap if "delta" in wrapper] if isinstance(wrap, list) else []
    return {
        "name": run_name(run),
        "directory": str(run.directory.absolute()),
        "finished": run.finished,
        "rounds": len(run.rounds),
        "early_stop": early_end(run),
        "final": {name: values.final for name, values in ranked.items()},
        "best": {name: {"value": value, "round": round_number} for name, value, round_number in best},
        "units": {name: facts(run, name).unit for name in ranked},
        "fairness": fairness_of(run),
        "privacy": {"epsilon": spent.final, "delta": deltas[-1]} if spent and deltas else {},
        "uplink_megabytes": total(run, "uplink_bits", MEGABYTE_BITS),
        "downlink_megabytes": total(run, "downlink_bits", MEGABYTE_BITS),
        "uplink_kilobytes_per_client_round": mean_over(run, "uplink_bits", "uplink_bits") / 8e3,
        "downlink_kilobytes_per_client_round": mean_over(run, "downlink_bits", "downlink_bits") / 8e3,
        "clients_per_round": workers(run),
        "steps_per_client_round": mean_over(run, "num_steps", "num_samples"),
        "examples_per_client_round": mean_over(run, "num_samples", "num_samples"),
        "selected": int(total(run, "selected")),
        "delivered": int(total(run, "delivered")),
        "simulated_s": total(run, "simulated_s"),
        "wall_s": total(run, "wall_s"),
        "resources": read_resources(run.directory),
    }


def require(runs: Sequence[Run], options: ReportOptions) -> None:
    """Raise RayflError if `options` names a setting or a metric that no run has, or a target that it cannot reach."""
    require_settings([run.experiment for run in runs], options.best_over)
    groups = group_runs(runs)
    known = ranked_names(groups, options.metric)
    if options.metric not in (None, *known):
        raise RayflError(
            f"no run has recorded the metric {options.metric!r}: {did_you_mean(str(options.metric), known)}"
        )
    for name in known[:1]:
        require_targets(options.targets, name, facts_of(groups, name))
    for name in options.values:
        number(name, groups, next(iter(known), None))


def comparison(runs: Sequence[Run], options: ReportOptions) -> list[TextTable]:
    """The comparison of runs by the `[report]` options: tables with their titles.

    The runs, the best first, as on their page; how much the metric differs between clients (if the metric is not one of
    single clients: the same metric on clients' own data); the methods' ranks over data sets, if several were swept; for
    a few runs, the first settings in which they differ. Runs that differ only in their seed are one row.
    """
    # A run loads this file, and pandas only for a comparison.
    from rayfl.report.pivot import tables_or_problems

    every = group_runs(runs)
    shown, names, _ = compared(every, options)
    metric = names[0] if names else None
    groups = best_first(shown, metric, options.last)
    columns = [
        *run_columns(groups),
        *cost_columns(groups, WORKED),
        *_values(groups, metric, options),
        *cost_columns(groups, SPENT)[:3],
        *further_columns(groups, metric, options),
    ]
    labels = [group.label for group in groups]
    rows = [[label, *(column.cells[row] for column in columns)] for row, label in enumerate(labels)]
    title = wording.counted(len(runs), "run") + f" by {metric}" * bool(metric) + ", best first" * (len(rows) > 1)
    settings = [[name, *cells] for name, cells in differing([group.settings for group in groups])]
    more = len(settings) - _MOST_DIFFERENCES
    differences = "what differs" + f" ({more} more settings not shown)" * (more > 0)
    return [
        TextTable(["Run", *(column.head for column in columns)], rows, title=title),
        *over_clients(groups, [] if metric is None else [metric, f"own/{metric.partition('/')[2]}"], others=False)[:1],
        *(
            ranks.table._replace(title=f"ranks over data sets: {ranks.title}")
            for table in tables_or_problems(every, options)[0]
            for ranks in table.ranks
        ),
        *[TextTable(["Setting", *labels], settings[:_MOST_DIFFERENCES], title=differences)]
        * (len(settings) > 0 and len(labels) <= _MOST_RUNS),
    ]


def over_clients(groups: Sequence[Group], first: Sequence[str] = (), others: bool = True) -> list[TextTable]:
    """The tables of `page_tables.fairness_tables`, with titles for a terminal."""
    tables = fairness_tables(groups, first, others)
    return [table._replace(title=f"over clients, {table.title}".rstrip(", ")) for table in tables]


def _values(groups: Sequence[Group], metric: str | None, options: ReportOptions) -> list[Column]:
    """The metric's last values, and the costs of a target."""
    if metric is None:
        return []
    unseen = f"unseen/{metric.partition('/')[2]}"
    shown = [(f"Mean of last {options.last}", metric, options.last)] * (options.last > 1) + [("Final", metric, 1)]
    shown += [("Unseen", unseen, 1)] * (unseen != metric and unseen in ranked_names(groups))
    return [
        *(metric_column(head, groups, name, last) for head, name, last in shown),
        *(
            Column(
                f"{head} to {target_words(target, facts_of(groups, metric))}",
                [score.words(decimals=decimals, counted=has_seeds(groups)) for score in costs[name]],
            )
            for target in options.targets
            for costs in [costs_to_target(groups, metric, target)]
            for head, name, decimals in (("Rounds", "rounds", 0), ("MB", "megabytes", 2))
        ),
    ]
