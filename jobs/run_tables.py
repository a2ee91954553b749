"""Tables about runs on disk: a list, one run, several side by side. Nothing here loads torch or Ray."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rayfl.experiment import toml
from rayfl.experiment.report_options import ReportOptions
from rayfl.report import wording
from rayfl.report.comparison import TextTable, comparison
from rayfl.report.overview import Overview, state_of
from rayfl.report.summary import Summary
from rayfl.run_directory.record import Run
from rayfl.settings import dotted

_MOST_DIFFERENCES = 12
"""The most differing settings that a terminal shows."""
_MOST_RUNS = 6
"""The most runs whose settings fit side by side into a terminal."""


def list_table(folder: Path, found: Sequence[Overview]) -> Table:
    """The runs in a folder, a row each."""
    listed = Table("run", "state")
    for head in ("rounds", "accuracy", "age"):
        listed.add_column(head, justify="right", no_wrap=True)
    for one in found:
        name = str(one.directory.relative_to(folder)) if one.directory != folder else one.directory.name
        rounds = f"{one.rounds}/{'?' if one.planned is None else one.planned}"
        accuracy = f"{one.accuracy[0]} {wording.percent(one.accuracy[1])}" if one.accuracy else ""
        listed.add_row(Text(name), one.state, rounds, accuracy, age(one.age_s))
    return listed


def age(seconds: float) -> str:
    """A time in its largest unit: 45 s, 12 min, 3 h, 2 days; "" if it is infinite."""
    if math.isinf(seconds):
        return ""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def result_table(numbers: Summary) -> Table:
    """The numbers of one run."""
    # Tables, records and pages call rounds by their numbers, from 0; progress says how many are done.
    called = f", 0 to {numbers['rounds'] - 1}" if numbers["rounds"] > 1 else ""
    title = f"{numbers['name']}: {wording.counted(numbers['rounds'], 'round')}{called}"
    table = Table(title=title, title_justify="left")
    table.add_column("result")
    table.add_column("value", justify="right")
    rows = {}
    for name, value in numbers["final"].items():
        best = numbers["best"][name]
        rows |= {f"final {name}": f"{100 * value:.2f} %"}
        rows |= {f"best {name} (round {best['round']})": f"{100 * best['value']:.2f} %"}
    rows |= {
        "uplink, all clients": f"{numbers['uplink_megabytes']:.3f} MB",
        "downlink, all clients": f"{numbers['downlink_megabytes']:.3f} MB",
        "uplink per client per round": f"{numbers['uplink_kilobytes_per_client_round']:.2f} kB",
        "downlink per client per round": f"{numbers['downlink_kilobytes_per_client_round']:.2f} kB",
        "updates delivered": f"{numbers['delivered']} of {numbers['selected']}",
        "simulated time": f"{numbers['simulated_s']:.1f} s",
        "real time": f"{numbers['wall_s']:.1f} s",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def description(run: Run) -> str:
    """The experiment of a run as TOML, and the platform that computed it."""
    known = {key: value for key, value in dotted(run.platform).items() if not key.startswith("variables.")}
    platform = "\n".join(f"# {key}: {value}" for key, value in known.items() if value not in (None, ""))
    return f"{toml.dumps(run.experiment)}\n# Computed with\n{platform or '# nothing yet'}"


def standing(run: Run, url: str | None = None) -> str:
    """The state of a run, its place, and the command that goes on with it or draws its page.

    `url`: its place in object storage; its directory is then a temporary copy.
    """
    place = str(run.directory.absolute()) if url is None else shlex.quote(url)
    state = state_of(run) if url is None or run.finished else "unfinished"
    lines = [f"{state}: {len(run.rounds)} of {run.experiment.get('rounds')} rounds", f"run: {url or place}"]
    if state in ("stopped", "unfinished"):
        lines.append(f"go on with: rayfl resume {place}")
    elif url is None and (run.directory / "report.html").exists():
        lines.append(f"report: {place}/report.html")
    elif state == "finished":
        lines.append(f"draw its page: rayfl report {place}")
    return "\n".join(lines)


def comparison_tables(runs: Sequence[Run], options: ReportOptions) -> list[Table]:
    """Runs side by side, and the first settings in which they differ."""
    found = comparison(runs, options)
    by = f" by {found.metric}" if found.metric else ""
    tables = [
        _rich(
            found.results, f"{wording.counted(len(runs), 'run')}{by}" + ", best first" * (len(found.results.rows) > 1)
        )
    ]
    differences = found.differences
    if differences.rows and len(differences.heads) <= _MOST_RUNS + 1:
        shown = TextTable(differences.heads, differences.rows[:_MOST_DIFFERENCES])
        more = len(differences.rows) - len(shown.rows)
        tables.append(_rich(shown, "what differs" + (f" ({more} more settings do)" if more else "")))
    return tables


def _rich(given: TextTable, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, head in enumerate(given.heads):
        table.add_column(Text(head), justify="right" if place else "left", overflow="fold")
    for row in given.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
