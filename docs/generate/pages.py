"""The sections and pages of the reference, by name.

They are made from docstrings, from the descriptions of settings, from the commands of jobs/cli.py, and from the
messages that messages.py measures.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from docs.generate.markdown import as_markdown, code, escaped, settings_table, table
from docs.generate.messages import measured, sent_section
from jobs.catalogue import about, example, for_newcomers, in_table, setting_rows, what_it_is
from jobs.cli import main
from rayfl import toml
from rayfl.choices.kinds import named
from rayfl.compress.base import Compressor
from rayfl.data.datasets import Source
from rayfl.data.partition import PartitionScheme
from rayfl.experiment.experiment import CHOSEN, LISTED, Experiment
from rayfl.methods.base import Method, PeerHalf
from rayfl.metrics.base import Metric
from rayfl.metrics.fairness import is_summary
from rayfl.models.base import Architecture
from rayfl.population.availability import Diurnal, PerClient, Trace
from rayfl.population.distributions import LogNormal, UniformValues
from rayfl.report import wording
from rayfl.run_directory.record import SCHEMAS
from rayfl.run_directory.run_files import PARTS
from rayfl.schedules.base import Schedule
from rayfl.selections.base import Selection
from rayfl.settings import Settings
from rayfl.tasks.base import Task
from rayfl.topology.graphs import Topology
from rayfl.wrappers.base import Wrapper
from rayfl.wrappers.elastic import ElasticHyper

ROOT = Path(__file__).resolve().parents[2]
METHODS = "reference/methods"
COMPARISONS = "results/comparisons.md"
"""The page whose tables have a row for many methods."""
COMMANDS = {
    Method: "methods",
    Compressor: "compressors",
    Architecture: "models",
    Task: "tasks",
    Source: "datasets",
    PartitionScheme: "partitions",
    Topology: "topologies",
    Selection: "selections",
    Schedule: "schedules",
    Wrapper: "wrappers",
    Metric: "metrics",
}
"""The command that lists a kind, which is also its section's name."""


# Any: a class of a kind.
def _example(chosen_by: str, name: str, found: Any) -> str:
    return f"```toml\n{toml.dumps(in_table(chosen_by, example(name, found))).strip()}\n```\n"


# Any: a class of a kind.
def _chosen_by(kind: Any) -> str:
    return next(key for key, one in LISTED.items() if one is kind)


# Methods.


def where(method: type[Method]) -> str:
    """Which half of the interface a method implements: "peers" or "server"."""
    return "peers" if issubclass(method, PeerHalf) else "server"


def facts(method: type[Method]) -> list[str]:
    """What an experiment's author must know about a method, in sentences."""
    found = ["Clients and a server." if where(method) == "server" else "Peers exchange messages, without a server."]
    can = method.capabilities
    if can.personalized:
        found.append("Every client ends with a model of its own.")
    found.append(for_newcomers(method))
    if can.needs_everyone:
        found.append("It needs all clients in every round, and refuses settings by which clients can be absent.")
    if can.own_compression:
        found.append("It has its own encoding of messages.")
    if can.uses_graph or (issubclass(method, PeerHalf) and method.gather):
        found.append("It uses a graph, the [`[topology]`](../topologies.md) table.")
    if can.takes_stale:
        kind = "peers on their own clocks" if issubclass(method, PeerHalf) else "asynchronous"
        found.append(f"It can be used with [schedules](../schedules.md) that are not in rounds ({kind}).")
    if method.splits:
        shares = ", ".join(f"{share:g} of the train split ({split})" for split, share in method.splits.items())
        found.append(f"It sets examples aside: {shares}; `[splits]` changes the shares.")
    if can.honours_retention:
        found.append("It uses `clients.retention_ratio`.")
    if unused := method.unused(method.Hyper()):
        settings = ", ".join(f"`{key}`" for key in sorted(unused))
        do = "they [do" if len(unused) > 1 else "it [does"
        found.append(f"It refuses {settings}: {do} nothing](../../how-to/settings.md) here.")
    if can.depends_on_num_rounds:
        found.append("Its rounds depend on the number of rounds, so a run that has begun cannot be extended.")
    return found


def method_page(name: str, method: type[Method]) -> str:
    """The page of one method."""
    texts = "\n\n".join(as_markdown(text) for text in about(method))
    listed = "".join(f"- {fact}\n" for fact in facts(method))
    source = Path(inspect.getfile(method)).relative_to(ROOT)
    return (
        f"# {name}\n\n{texts}\n\nSource: `{source}`\n\n## In an experiment\n\n{listed}\n"
        f"{_example('method', name, method)}\n## What is sent\n\n{sent_section(name)}\n"
        f"## Settings\n\n{settings_table(method) or 'None.'}\n"
    )


def methods_section() -> str:
    """All methods in a table."""
    rows = [[f"[`{name}`]({name}.md)", where(method), escaped(method.paper)] for name, method in named(Method).items()]
    return table(["method", "where", "paper"], rows)


def elastic_section() -> str:
    """The settings of elastic aggregation."""
    return settings_table(ElasticHyper)


# The other kinds.


# Any: a kind.
def kind_section(kind: Any) -> str:
    """All classes of a kind, each with its settings and an example."""
    chosen_by = _chosen_by(kind)
    parts = []
    for name, found in named(kind).items():
        texts = "\n\n".join(as_markdown(text) for text in about(found))
        parts.append(f"## {name}\n\n{texts}\n\n{settings_table(found)}\n{_example(chosen_by, name, found)}")
    return "\n".join(parts)


# Any: a kind.
def kind_table(kind: Any) -> str:
    """All classes of a kind in a table."""
    rows = [[f"[`{name}`](#{name})", escaped(what_it_is(found))] for name, found in named(kind).items()]
    return table([kind.label, "what it is"], rows)


# The experiment.


def experiment_section() -> str:
    """Every table of an experiment file with its settings."""
    rows = {row[0]: row for row in setting_rows(Experiment)}
    fields = Experiment.model_fields
    tables = {key: field.annotation for key, field in fields.items() if _is_settings(field.annotation)}
    links = [
        [
            code(f"[{key}]"),
            f"{'required' if Experiment.model_fields[key].is_required() else 'optional'}",
            _kind_link(key),
        ]
        for key in CHOSEN
    ]
    plain = [row for key, row in rows.items() if key not in tables and key not in CHOSEN]
    parts = [
        "## At the top\n\n"
        + table(
            ["setting", "default", "allowed", "what it is"],
            [[code(name), code(default), escaped(allowed), escaped(what)] for name, default, allowed, what in plain],
        ),
        "## What is chosen by name\n\n" + table(["table", "", "what there is"], links),
    ]
    for key, kind in tables.items():
        text = as_markdown(inspect.getdoc(kind) or "")
        parts.append(f"## [{key}]\n\n{text}\n\n{settings_table(kind)}")
        if key == "clients":
            parts += [_inner(one) for one in (PerClient, Diurnal, Trace, LogNormal, UniformValues)]
    return "\n".join(parts)


# Any: an annotation.
def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings) and annotation not in CHOSEN.values()


def _kind_link(key: str) -> str:
    kind: Any = CHOSEN[key]
    page = "methods/index.md" if kind is Method else f"{COMMANDS[kind]}.md"
    return f"[{COMMANDS[kind]}]({page})"


def _inner(kind: type[Settings]) -> str:
    """A table inside of `[clients]`."""
    titles = {
        PerClient: "availability by chance",
        Diurnal: "availability by the hour",
        Trace: "availability from a file",
    }
    title = titles.get(kind, f"a trait: {kind.__name__}")
    return f"### {title}\n\n{as_markdown(inspect.getdoc(kind) or '')}\n\n{settings_table(kind)}"


# Commands and metrics.


def commands_section() -> str:
    """Every command with its arguments and options."""
    parts = []
    for name, command in main.commands.items():
        context = click.Context(command, info_name=f"rayfl {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        text = "\n\n".join(
            escaped(" ".join(paragraph.split())) for paragraph in inspect.cleandoc(command.help or "").split("\n\n")
        )
        options = [one.get_help_record(context) for one in command.get_params(context) if isinstance(one, click.Option)]
        rows = [[code(option[0]), escaped(option[1])] for option in options if option is not None]
        parts.append(f"## rayfl {name}\n\n```text\n{usage}\n```\n\n{text}\n\n{table(['option', 'what it does'], rows)}")
    return "\n".join(parts)


def metrics_section() -> str:
    """Every metric: its name, unit and meaning, and the methods that record it if they are few."""
    recorded: dict[str, list[str]] = {}
    for method in named(Method):
        for name in (one for one in measured(method)[1] if not is_summary(one)):
            recorded.setdefault(name, []).append(method)
    rows = []
    for name in sorted({*wording.NAMES, *recorded}):
        by = recorded.get(name, [])
        few = ", ".join(f"[`{one}`](methods/{one}.md)" for one in by) if 0 < len(by) <= 8 else ""
        facts = wording.metric(name)
        meaning = escaped(f"{facts.title}: {facts.meaning}" if facts.title != name else "")
        rows.append([code(name), facts.unit.replace("%", "share of 1"), meaning, few])
    return table(["metric", "unit", "what it is", "recorded by, if by few"], rows)


def columns_section() -> str:
    """The columns of the three tables of records."""
    rows = [
        [code(f"records/{name}.parquet"), ", ".join(code(field.name) for field in schema)]
        for name, schema in SCHEMAS.items()
    ]
    return table(["file", "columns"], rows)


def run_files_section() -> str:
    """The files of a run directory."""
    return table(["file", "content"], [[name, text] for files in PARTS for name, text in files.documented.items()])


def papers_section() -> str:
    """Every method with its paper, and the row of each comparison that has it."""
    rows = []
    listed = comparison_rows((ROOT / "docs" / COMPARISONS).read_text(encoding="utf-8"))
    for name, method in named(Method).items():
        key = _letters(name)
        where = [f"[{title}]({COMPARISONS}#{anchor})" for title, anchor in listed.get(key, {}).items()]
        rows.append([f"[`{name}`]({METHODS}/{name}.md)", escaped(method.paper), ", ".join(where) or "-"])
    return table(["method", "paper", "compared in"], rows)


def comparison_rows(page: str) -> dict[str, dict[str, str]]:
    """The rows of a method in the tables of a page, by the letters of its name: section titles and the row's anchor."""
    rows: dict[str, dict[str, str]] = {}
    for title, key, anchor, _ in _table_rows(page):
        # The first row of a method that has several.
        rows.setdefault(key, {}).setdefault(title, anchor)
    return rows


def with_row_anchors(page: str) -> str:
    """The page with an anchor in each row of its tables, to which `comparison_rows` leads."""
    lines = page.splitlines()
    for _, _, anchor, number in _table_rows(page):
        lines[number] = f'| <a id="{anchor}"></a>{lines[number].removeprefix("| ")}'
    return "\n".join(lines) + "\n"


def _table_rows(page: str) -> Iterator[tuple[str, str, str, int]]:
    """Each row of a page's tables: its section, the letters of its first cell's name, an anchor, the line's number."""
    title = ""
    used = dict[str, int]()
    lines = [*page.splitlines(), ""]
    for number, line in enumerate(lines[:-1]):
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| ") and title and not lines[number + 1].startswith("|-"):
            key = _letters(line.split("|")[1].partition(",")[0])
            anchor = f"{title.lower().replace(' ', '-')}-{key}"
            used[anchor] = used.get(anchor, 0) + 1
            yield title, key, anchor if used[anchor] == 1 else f"{anchor}-{used[anchor]}", number


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


SECTIONS: Mapping[str, Callable[[], str]] = {
    "papers": papers_section,
    "methods": methods_section,
    "elastic": elastic_section,
    "experiment": experiment_section,
    "commands": commands_section,
    "recorded-names": metrics_section,
    "columns": columns_section,
    "run-files": run_files_section,
    **{name: (lambda kind=kind: kind_section(kind)) for kind, name in COMMANDS.items() if kind is not Method},
    **{f"{name}-table": (lambda kind=kind: kind_table(kind)) for kind, name in COMMANDS.items() if kind is not Method},
}
"""The generated sections by the names in the marks."""
