"""The pages that are made as the site is built: a hook of mkdocs (mkdocs.yml), and no copies in git.

Where a page says `<!-- reference: compressors -->` the section of that name takes its place; every method gets a page;
k8s/README.md and CHANGELOG.md become pages. All of it comes from docstrings, from the settings' own descriptions, from
the commands of jobs/cli.py, and of what a method sends from one small run of it.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.catalogue import about, example, overrides, setting_rows, what_it_is
from jobs.cli import main
from rayfl.choices import named
from rayfl.compress.base import Compressor
from rayfl.data.datasets import Source
from rayfl.data.partition import PartitionScheme
from rayfl.determinism.process import prepare_process
from rayfl.experiment import toml
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.unknown_keys import CHOSEN
from rayfl.methods.base import Method, PeerHalf
from rayfl.methods.shared.elastic import ElasticHyper
from rayfl.models import Architecture
from rayfl.population.availability import Diurnal, PerClient, Trace
from rayfl.population.distributions import Groups, LogNormal, Uniform
from rayfl.report import wording
from rayfl.run_directory.tables import SCHEMAS
from rayfl.settings import Settings
from rayfl.testing.executors import play
from rayfl.testing.watching import buffer_bits, watched
from rayfl.topology.graphs import Topology

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"k8s/README.md": "kubernetes.md", "CHANGELOG.md": "changelog.md"}
"""Files outside of docs/ that are pages of the site; a link to one as GitHub needs it leads to its page."""
METHODS = "reference/methods"
MARK = re.compile(r"<!-- reference: ([a-z-]+) -->")
COMMANDS = {
    Method: "methods",
    Compressor: "compressors",
    Architecture: "models",
    Source: "datasets",
    PartitionScheme: "partitions",
    Topology: "topologies",
}
MEASURED: Mapping[str, Any] = {
    "rounds": 4,
    "seed": 1,
    "data": {"name": "synthetic", "num_groups": 4, "samples_per_group": 40, "dim": 64},
    "partition": "natural",
    "clients": {"count": 4},
    "model": {"name": "mlp", "hidden": [10]},
}
"""The experiment in which every method's messages are weighed."""

prepare_process()


# What mkdocs calls.


def on_config(config: "MkDocsConfig") -> None:
    """Put the pages of the methods into the navigation."""
    for pages in _lists(config.nav or []):
        if f"{METHODS}/index.md" in pages:
            pages += [f"{METHODS}/{name}.md" for name in named(Method)]


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the pages that no file of docs/ has."""
    from mkdocs.structure.files import File

    for name, method in named(Method).items():
        files.append(File.generated(config, f"{METHODS}/{name}.md", content=method_page(name, method)))
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=outside_page(path)))


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Put the generated sections in their places, and lead links out of docs/ to the pages of those files."""
    if page.parent is None:
        # Of a tab that is one page a list of its pages says nothing.
        page.meta["hide"] = ["navigation"]
    up = "../" * page.file.src_uri.count("/")
    for path, name in OUTSIDE.items():
        markdown = markdown.replace(f"]({up}../{path}", f"]({up}{name}")
    return with_sections(markdown)


def outside_page(path: str) -> str:
    """A file outside of docs/ as a page, on which links to other files of the repository are their paths."""
    folder = Path(path).parent

    def named_file(link: re.Match[str]) -> str:
        file = (folder / link[2]).as_posix()
        return code(file) if link[1] == link[2] else f"{link[1]} ({code(file)})"

    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)", named_file, text)


def with_sections(markdown: str) -> str:
    """The same page with the generated sections in the places of their marks."""
    return MARK.sub(lambda mark: SECTIONS[mark[1]](), markdown)


# Any: the navigation of mkdocs.yml.
def _lists(nav: Any) -> Iterable[list[Any]]:
    """Every list of pages in the navigation."""
    if isinstance(nav, list):
        yield nav
    parts = nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ()
    for part in parts:
        yield from _lists(part)


# Texts.


def as_markdown(text: str) -> str:
    """A docstring as Markdown: letters as they are, `- ` lists, and lines indented by four as they stand."""
    lines: list[str] = []
    for line in text.splitlines():
        verbatim, item, follows = line.startswith("    "), line.startswith("- "), line.startswith("  ")
        before = lines[-1] if lines else ""
        if before and (
            (item and not before.startswith(("- ", "  ")))
            or (not item and not follows and before.startswith(("- ", "  ")))
            or verbatim != before.startswith("    ")
        ):
            lines.append("")
        lines.append(
            line if verbatim else f"- {escaped(line[2:])}" if item else f"{line[: 2 * follows]}{escaped(line)}"
        )
    return "\n".join(lines)


def escaped(text: str) -> str:
    """A line in which Markdown and HTML change nothing but `code`."""
    parts = re.split(r"(`[^`]*`)", text.strip())
    return "".join(
        part if number % 2 else re.sub(r"([\\*_{}\[\]#])", r"\\\1", part.replace("&", "&amp;").replace("<", "&lt;"))
        for number, part in enumerate(parts)
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the cells are Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"


def code(text: str) -> str:
    """Text as code; an empty one as nothing."""
    return f"`{text}`" if text else ""


# Any: a class of a kind, or of settings.
def settings_table(found: Any) -> str:
    """The settings that a class takes, "" where it takes none."""
    rows = [
        [code(name), code(default), escaped(allowed), escaped(description)]
        for name, default, allowed, description in setting_rows(found)
    ]
    return table(["setting", "default", "allowed", "what it is"], rows) if rows else ""


# Any: a class of a kind.
def _example(chosen_by: str, name: str, found: Any) -> str:
    given = example(name, found)
    words = " ".join(overrides(chosen_by, given))
    return f"```toml\n{toml.dumps({chosen_by: given}).strip()}\n```\n\nOn the command line: `{words}`\n"


# Any: a class of a kind.
def _chosen_by(kind: Any) -> str:
    return next(key for key, one in CHOSEN.items() if one is kind)


# Methods.


@dataclass(frozen=True)
class Sent:
    """A message of a method: its name, the direction, its bytes, and the rounds in which it was seen."""

    name: str
    direction: str
    num_bytes: tuple[int, ...]
    rounds: tuple[int, ...]


@cache
def measured(name: str) -> tuple[tuple[Sent, ...], frozenset[str]]:
    """What one client of a method sends and receives in a small run, and the names of the metrics recorded."""
    kind = named(Method)[name]
    graph = {"topology": "ring"} if issubclass(kind, PeerHalf) or kind.uses_graph else {}
    setup, log = watched(prepare(Experiment(**MEASURED, **graph, method=name)))
    records, _ = play(setup)
    seen: dict[tuple[str, str], dict[int, int]] = {}
    for record in records:
        round = record.row.round
        down = [log.broadcasts.get(round, {}), *log.down.get((round, 0), [])]
        messages = [("up", log.up.get((round, 0), {})), *(("down", message) for message in down)]
        for direction, message in messages:
            for word, packet in message.items():
                key = (re.sub(r" \d+$", " N", word), "to each neighbour" if issubclass(kind, PeerHalf) else direction)
                sizes = seen.setdefault(key, {})
                sizes[round] = sizes.get(round, 0) + buffer_bits({word: packet}) // 8
    sent = [Sent(*key, tuple(sizes.values()), tuple(sizes)) for key, sizes in seen.items()]
    return tuple(sent), frozenset(metric.name for record in records for metric in record.metrics)


def _num_parameters() -> int:
    setup = prepare(Experiment(**MEASURED, method="local"))
    return sum(array.size for array in setup.initial_arrays.values())


def sent_section(name: str) -> str:
    """What crosses the wire, weighed."""
    sent, _ = measured(name)
    size = _num_parameters()
    intro = (
        "Weighed as this page was built, at the defaults: the real buffers of one of four clients in "
        f"{MEASURED['rounds']} rounds, with a model of {size} parameters, {4 * size:,} bytes as fp32."
    )
    if not sent:
        return f"{intro} Nothing crossed the wire.\n"
    rows = []
    for one in sent:
        low, high = min(one.num_bytes), max(one.num_bytes)
        rounds = "every" if len(one.rounds) == MEASURED["rounds"] else ", ".join(map(str, one.rounds))
        rows.append([code(one.name), one.direction, f"{low:,}" if low == high else f"{low:,} to {high:,}", rounds])
    return f"{intro}\n\n{table(['message', 'direction', 'bytes', 'rounds'], rows)}"


def where(method: type[Method]) -> str:
    """Where messages meet."""
    return "peers" if issubclass(method, PeerHalf) else "server"


def facts(method: type[Method]) -> list[str]:
    """What else an experiment must know of a method, in sentences."""
    found = [f"Messages meet at the {where(method)}." if where(method) == "server" else "Peers exchange; no server."]
    if method.personalized:
        found.append("Every client ends with a model of its own.")
    if method.own_compression:
        found.append("It fixes what it sends: `[uplink]` and `[downlink]` may not be set.")
    if method.uses_graph or issubclass(method, PeerHalf):
        found.append("It takes a graph, the [`[topology]`](../topologies.md) table.")
    if method.splits:
        shares = ", ".join(f"{share:g} of the train split ({split})" for split, share in method.splits.items())
        found.append(f"It sets samples aside: {shares}; `[splits]` says otherwise.")
    if method.honours_retention:
        found.append("It follows `clients.retention_ratio`.")
    if method.depends_on_num_rounds:
        found.append("Its rounds depend on their number, so a run that has begun cannot be made longer.")
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
    """All of a kind, each with its settings and an example."""
    chosen_by = _chosen_by(kind)
    parts = []
    for name, found in named(kind).items():
        texts = "\n\n".join(as_markdown(text) for text in about(found))
        parts.append(f"## {name}\n\n{texts}\n\n{settings_table(found)}\n{_example(chosen_by, name, found)}")
    return "\n".join(parts)


# Any: a kind.
def kind_table(kind: Any) -> str:
    """All of a kind in a table."""
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
            parts += [_inner(one) for one in (PerClient, Diurnal, Trace, LogNormal, Uniform, Groups)]
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
    """Every metric: its name, unit and meaning, and which methods record it, where that is not all of them."""
    recorded: dict[str, list[str]] = {}
    for method in named(Method):
        for name in measured(method)[1]:
            recorded.setdefault(name, []).append(method)
    rows = []
    for name in sorted({*wording.NAMES, *recorded}):
        by = recorded.get(name, [])
        few = ", ".join(f"[`{one}`](methods/{one}.md)" for one in by) if 0 < len(by) <= 8 else ""
        title, unit, meaning = wording.words(name)
        unit = unit.replace("%", "share of 1")
        rows.append([code(name), unit, escaped(f"{title}: {meaning}" if title != name else ""), few])
    return table(["metric", "unit", "what it is", "recorded by, where by few"], rows)


def columns_section() -> str:
    """The columns of the three tables of records."""
    rows = [
        [code(f"records/{name}.parquet"), ", ".join(code(field.name) for field in schema)]
        for name, schema in SCHEMAS.items()
    ]
    return table(["file", "columns"], rows)


SECTIONS: Mapping[str, Callable[[], str]] = {
    "methods": methods_section,
    "elastic": elastic_section,
    "experiment": experiment_section,
    "commands": commands_section,
    "metrics": metrics_section,
    "columns": columns_section,
    **{name: (lambda kind=kind: kind_section(kind)) for kind, name in COMMANDS.items() if kind is not Method},
    **{f"{name}-table": (lambda kind=kind: kind_table(kind)) for kind, name in COMMANDS.items() if kind is not Method},
}
"""The generated sections by the names in the marks."""
