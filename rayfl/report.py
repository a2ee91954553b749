"""Run directories -> one self-contained HTML page: what was run, what came out, and what it cost.

The page loads nothing: plots are inline SVG, there is no script and no outside style or font.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import jinja2
import numpy as np

from rayfl.figures import accuracy_names, sections, title
from rayfl.files import write_text
from rayfl.plots import key
from rayfl.record import Run, read_run
from rayfl.series import (
    MEGABYTE_BITS,
    Group,
    Reached,
    curve,
    flatten,
    groups,
    is_accuracy,
    metric_names,
    reached,
    run_name,
    series,
)
from rayfl.settings import SettingsError

_TARGETS = (0.8, 0.9, 0.95)
_PLUS_MINUS = "\u00b1"
_NONE = "\u2013"


class Best(TypedDict):
    """The largest value of a metric and the first round that had it."""

    value: float
    round: int


class Summary(TypedDict):
    """Plain values, by name, for a table or for JSON.

    `final` and `best` are keyed by the name of the accuracy. Megabytes are totals over clients and rounds, kilobytes
    means over the clients and rounds that sent (received) anything; 1 MB = 1e6 B.
    """

    name: str
    directory: str
    finished: bool
    rounds: int
    final: dict[str, float]
    best: dict[str, Best]
    uplink_megabytes: float
    downlink_megabytes: float
    uplink_kilobytes_per_client_round: float
    downlink_kilobytes_per_client_round: float
    selected: int
    delivered: int
    simulated_s: float
    wall_s: float


def report(directories: Sequence[Path], output: Path) -> Path:
    """Write the page about one run or several to `output`. SettingsError if a directory is no run, or none is given."""
    if not directories:
        raise SettingsError("a report needs at least one run directory: name one")
    found = groups([read_run(directory) for directory in directories])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, environment.get_template("report.html.j2").render(page(found)))
    return output


def summary(run: Run) -> Summary:
    """A run in numbers."""
    accuracies = {name: found for name in metric_names(run) if is_accuracy(name) and (found := series(run, name))}
    return {
        "name": run_name(run),
        "directory": str(run.directory),
        "finished": run.finished,
        "rounds": len(run.rounds),
        "final": {name: found.final for name, found in accuracies.items()},
        "best": {name: {"value": found.best[0], "round": found.best[1]} for name, found in accuracies.items()},
        "uplink_megabytes": _total(run, "uplink_bits") / MEGABYTE_BITS,
        "downlink_megabytes": _total(run, "downlink_bits") / MEGABYTE_BITS,
        "uplink_kilobytes_per_client_round": _mean_kilobytes(run, "uplink_bits"),
        "downlink_kilobytes_per_client_round": _mean_kilobytes(run, "downlink_bits"),
        "selected": int(_total(run, "selected")),
        "delivered": int(_total(run, "delivered")),
        "simulated_s": _total(run, "simulated_s"),
        "wall_s": _total(run, "wall_s"),
    }


def _total(run: Run, column: str) -> float:
    return float(run.rounds[column].to_numpy().sum())


def _mean_kilobytes(run: Run, column: str) -> float:
    bits = run.clients[column].to_numpy()
    return float(bits[bits > 0].mean()) / 8e3 if (bits > 0).any() else 0.0


def page(found: Sequence[Group]) -> dict[str, object]:
    """All that the template shows."""
    several = sum(len(group.runs) for group in found) > 1
    names = accuracy_names(found)
    if names:
        found = sorted(found, key=lambda group: -_final(group, names[0]))
    return {
        "title": "Comparison of runs" if len(found) > 1 else found[0].label,
        "lede": _lede(found),
        "unfinished": [run_name(run) for group in found for run in group.runs if not run.finished],
        "empty": not any(len(run.rounds) for group in found for run in group.runs),
        "cards": [] if several else _cards(found[0].runs[0]),
        "ranking": _ranking(found, names) if several else None,
        "targets": _targets(found, names[0]) if several and names else None,
        "settings": _settings([run for group in found for run in group.runs]),
        "differences": _differences(found) if len(found) > 1 else None,
        "sections": sections(found),
    }


def _lede(found: Sequence[Group]) -> str:
    runs = [run for group in found for run in group.runs]
    if len(found) > 1:
        seeds = ", runs that differ only in their seed taken together" if len(runs) > len(found) else ""
        return f"{len(runs)} federated runs side by side{seeds}."
    clients = max(len(run.clients["client"].unique()) for run in runs)
    rounds = max(len(run.rounds) for run in runs)
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
    parts = [_name(runs[0], key) for key in ("method", "data")]
    method, data = (f" {word} {name}" if name else "" for word, name in zip(("with", "on"), parts, strict=True))
    return (
        f"{clients} clients trained{method}{data} for {rounds} rounds{seeds}. "
        "Their data stayed with them; what travelled are the messages counted here."
    )


def _name(run: Run, table: str) -> str:
    """ "fedpse" for {"method": {"name": "fedpse", ...}} and for {"method": "fedpse"}."""
    value = run.experiment.get(table, "")
    return str(value.get("name", "") if isinstance(value, Mapping) else value)


def _cards(run: Run) -> list[tuple[str, str, str]]:
    """Headline numbers: what, value, and a remark."""
    numbers = summary(run)
    cards = []
    for name in accuracy_names(groups([run])):
        found = series(run, name)
        assert found is not None, f"{name} is listed but has no values"
        best, at = found.best
        cards.append((title(name), _percent(found.final), f"final; best {_percent(best)} in round {at}"))
    up, down = numbers["uplink_kilobytes_per_client_round"], numbers["downlink_kilobytes_per_client_round"]
    cards.append(("Total sent up", _megabytes(numbers["uplink_megabytes"]), f"{up:,.1f} kB per client and round"))
    cards.append(("Total sent down", _megabytes(numbers["downlink_megabytes"]), f"{down:,.1f} kB per client and round"))
    if numbers["simulated_s"]:
        cards.append(("Simulated time", _seconds(numbers["simulated_s"]), "on the modelled clients and networks"))
    cards.append(("Wall-clock time", _seconds(numbers["wall_s"]), f"for {numbers['rounds']} rounds on this machine"))
    return cards


def _ranking(found: Sequence[Group], names: Sequence[str]) -> dict[str, object]:
    """The table of runs, best final accuracy first."""
    with_seeds = any(len(group.runs) > 1 for group in found)
    head = ["Run", *(["Seeds"] if with_seeds else []), "Rounds", *(f"Final: {title(name)}" for name in names)]
    rows = []
    for style, group in enumerate(found):
        numbers = [summary(run) for run in group.runs]
        cells = [", ".join(str(seed) for seed in group.seeds)] if with_seeds else []
        cells.append(" / ".join(dict.fromkeys(str(one["rounds"]) for one in numbers)))
        cells += [_finals(group, name) for name in names]
        cells.append(_megabytes(float(np.mean([one["uplink_megabytes"] for one in numbers]))))
        cells.append(_megabytes(float(np.mean([one["downlink_megabytes"] for one in numbers]))))
        cells.append(_seconds(float(np.mean([one["simulated_s"] for one in numbers]))))
        cells.append(_seconds(float(np.mean([one["wall_s"] for one in numbers]))))
        rows.append((key(group.label, style), cells))
    return {
        "head": [*head, "Up", "Down", "Simulated time", "Wall-clock time"],
        "rows": rows,
        "with_seeds": with_seeds,
        "by": title(names[0]) if names else "",
    }


def _final(group: Group, name: str) -> float:
    """The mean final value, to sort by: a run that has none comes last."""
    found = curve(group, name)
    return float(found.mean[-1]) if found is not None and not np.isnan(found.mean[-1]) else -np.inf


def _finals(group: Group, name: str) -> str:
    found = curve(group, name)
    if found is None:
        return _NONE
    if len(group.runs) == 1:
        return _percent(found.mean[-1])
    return f"{100 * found.mean[-1]:.1f} {_PLUS_MINUS} {100 * found.deviation[-1]:.1f} %"


def _targets(found: Sequence[Group], name: str) -> dict[str, object]:
    """What each run had spent when it first reached a share of the best final accuracy."""
    best = max(_final(group, name) for group in found)
    targets = [share * best for share in _TARGETS] if np.isfinite(best) else []
    rows = [
        (key(group.label, style), [_spent([reached(run, name, target) for run in group.runs]) for target in targets])
        for style, group in enumerate(found)
    ]
    head = [f"{_percent(target)} ({share:.0%} of the best)" for share, target in zip(_TARGETS, targets, strict=False)]
    return {"name": title(name), "head": ["Run", *head], "rows": rows}


def _spent(found: Sequence[Reached | None]) -> str:
    there = [one for one in found if one is not None]
    if not there:
        return "not reached"
    if len(there) < len(found):
        return f"reached by {len(there)} of {len(found)} seeds"
    megabytes, seconds = np.mean([(one.megabytes, one.simulated_s) for one in there], axis=0)
    rounds = f"{np.mean([one.round for one in there]):.1f}".removesuffix(".0")
    return f"{_megabytes(megabytes)}, {_seconds(seconds)}, round {rounds}"


def _described(run: Run) -> dict[str, object]:
    """The experiment and the platform as dotted keys."""
    return flatten({**run.experiment, "platform": dict(run.platform)})


def _settings(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What all runs share, a row a table of the experiment: [(table, [(key, value), ...]), ...]."""
    flat = [_described(run) for run in runs]
    shared = {key: value for key, value in flat[0].items() if all(key in one and one[key] == value for one in flat)}
    rows: dict[str, list[tuple[str, str]]] = {}
    for dotted, value in shared.items():
        table, dot, rest = dotted.partition(".")
        rows.setdefault(table if dot else "experiment", []).append((rest or table, _value(value)))
    return list(rows.items())


def _differences(found: Sequence[Group]) -> dict[str, object]:
    """The settings in which runs differ, a row a setting and a column a run."""
    flat = [_described(group.runs[0]) for group in found]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in ("name", "seed", "output")]
    rows = [(key, [_value(one[key]) if key in one else _NONE for one in flat]) for key in keys]
    return {
        "head": ["Setting", *(group.label for group in found)],
        "rows": [row for row in rows if len(set(row[1])) > 1],
    }


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(_value(one) for one in value) if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _megabytes(value: float) -> str:
    if value == 0:
        return "0 MB"
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f} MB"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
