"""What the documentation shows is what there is: links, commands, settings, programs, and all that is registered.

Blocks with a title, as ```toml title="compare.toml", are whole files of their page, and are played; others are pieces.
`make docs` builds the site and fails on a warning.
"""

import ast
import contextlib
import functools
import inspect
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

import rayfl
from benchmarks.__main__ import main as benchmarks
from docs.generate import hooks, pages, verdicts
from jobs.arguments import WithSettings
from jobs.cli import main
from jobs.reproduce import Paper
from jobs.shipped_experiments import experiment_file
from jobs.tune import Tuning
from rayfl import toml
from rayfl.choices.kinds import find, named
from rayfl.experiment.experiment import CHOSEN, Experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.experiment.sweep import read_sweep
from rayfl.experiment.table import read_table, with_overrides
from rayfl.methods.base import Method, PeerHalf
from rayfl.testing.executors import play

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BASE: dict[str, Any] = {
    "rounds": 3,
    "data": "digits",
    "partition": "iid",
    "clients": {"count": 4},
    "model": "logistic",
    "method": "fedavg",
}
"""What the pieces of experiments are pieces of."""
OTHER_FILES = ("pyproject.toml", "claims.toml")
"""TOML files that are no experiments."""


@dataclass(frozen=True)
class Block:
    """A block of code: its language, "" where it says none, and the file that it is, "" for a piece."""

    language: str
    title: str
    text: str


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The blocks of a page, of one language or of all."""
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', page, flags=re.MULTILINE | re.DOTALL)
    return [Block(*one) for one in found if language in (None, one[0])]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@contextmanager
def naming(page: Path) -> Iterator[None]:
    """Add the page to whatever fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(str(page.relative_to(ROOT)))
        raise


@contextmanager
def folder_of(page: Path) -> Iterator[Path]:
    """The current directory meanwhile: it has the files of the tutorials and of the page, in their last form, and
    `jobs`."""
    with naming(page), TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        (folder / "jobs").symlink_to(ROOT / "jobs")
        for source in (*sorted((DOCS / "tutorials").glob("*.md")), page):
            for block in blocks(text_of(source)):
                if block.title:
                    (folder / block.title).write_text(block.text)
        yield folder


# Links.


@functools.cache
def anchors(page: Path) -> set[str]:
    """The names of a page's headings, those of its generated sections among them."""
    headings = re.findall(r"^#+ (.+)$", hooks.with_sections(text_of(page)), flags=re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s-]+", "-", one) for one in words}


def test_every_link_leads_somewhere():
    for page in PAGES:
        with naming(page):
            made = {DOCS / pages.METHODS / f"{name}.md" for name in named(Method)}
            prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
            for link in re.findall(r"\]\(([^)\s]+)\)", prose):
                target, _, anchor = link.partition("#")
                if re.match(r"https?://", link):
                    continue
                there = (page.parent / target).resolve() if target else page
                assert there in made or there.is_file(), link
                if anchor:
                    assert anchor in anchors(there), link


def test_every_file_that_explanations_name_is_there():
    files = [
        path.as_posix()
        for folder in ("rayfl", "actors", "jobs", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for page in (DOCS / "explanations").glob("*.md"):
        named = {*re.findall(r"`([\w/]+\.py)`", text_of(page))}
        gone = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
        assert not gone, (page.name, gone)


def test_what_leads_out_of_the_documentation_has_a_page_on_the_site():
    inside = {path.relative_to(DOCS).as_posix() for path in PAGES[1:]}
    leading_out = {
        (page.parent / link).resolve().relative_to(ROOT).as_posix()
        for page in PAGES[1:]
        for link in re.findall(r"\]\(((?:\.\./)+[^)#\s]+\.md)\)", text_of(page))
        if not (page.parent / link).resolve().is_relative_to(DOCS)
    }
    assert leading_out and leading_out <= set(hooks.OUTSIDE)
    assert not inside & set(hooks.OUTSIDE.values())
    for path in hooks.OUTSIDE:
        assert re.findall(r"\]\((?!https?://|#)", hooks.outside_page(path)) == []


def test_the_site_loads_nothing_from_elsewhere():
    site = yaml.safe_load(text_of(ROOT / "mkdocs.yml"))
    assert site["theme"]["font"] is False and site["use_directory_urls"] is False
    # Without a file of this name the plugin `offline` would load one from elsewhere.
    scripts = [*site["extra"]["polyfills"], *site["extra_css"], *site.get("extra_javascript", [])]
    assert "iframe-worker.js" in scripts and all((DOCS / script).is_file() for script in scripts)


def test_no_page_has_links_that_only_a_servers_root_has():
    config = pytest.importorskip("mkdocs.config").load_config(str(ROOT / "mkdocs.yml"))
    assert "404.html" in config.theme.static_templates
    hooks.on_config(config)
    assert "404.html" not in config.theme.static_templates


# Commands.


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command on a page, in blocks and in sentences, without `rayfl` and `python -m`."""
    shells = [one.text for one in blocks(text) if one.language in ("", "bash", "console", "sh")]
    lines = [line for shell in shells for line in shell.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [
        code for code in re.findall(r"`([^`\n]+)`", prose) if re.match(r"(rayfl|python -m benchmarks) [a-z-]", code)
    ]
    inline += re.findall(r"`(rayfl [a-z-][^`]*?\n[^`]*?)`", prose)
    for line in [*lines, *inline]:
        given = re.sub(r"[\[\]](?=[A-Zk-])|(?<=[A-Z.])\]| ?\.\.\.", "", line) if line in inline else line
        found = re.search(r"(?:^(?:\$ |\.venv/bin/)?|python -m )(rayfl|benchmarks)(?: (.*))?$", given)
        if found and not line.startswith("rayfl: "):
            words = shlex.split(found[2] or "", comments=True)
            yield [*{"rayfl": (), "benchmarks": ["benchmarks"]}[found[1]], *words]


def test_commands_are_found_in_blocks_and_in_sentences():
    text = (
        "Say `rayfl run FILE [key=value ...] [--rounds N]`.\n```bash\nray job -- python -m rayfl ls a  # b\n"
        "python -m benchmarks start\n```\n"
    )
    found = [["ls", "a"], ["benchmarks", "start"], ["run", "FILE", "key=value", "--rounds", "N"]]
    assert list(commands(text)) == found


def test_every_command_shown_is_one():
    for page in PAGES:
        with folder_of(page):
            for words in commands(text_of(page)):
                if words[:1] in ([], ["--help"]):
                    continue
                known = {**main.commands} | {f"benchmarks {name}": one for name, one in benchmarks.commands.items()}
                named_by = 2 if words[0] == "benchmarks" else 1
                command = known.get(" ".join(words[:named_by]))
                assert command is not None, words
                context = click.Context(command, info_name=words[0])
                # What click's parser makes of options is not converted yet: N and DIR stand for numbers and folders.
                _, arguments, _ = command.make_parser(context).parse_args(list(words[named_by:]))
                assert arguments == [], words
                if isinstance(command, WithSettings) and "key=value" not in words:
                    settings_exist(command, context, words[1:])
                elif words[0] in pages.COMMANDS.values() and words[1:] and words[1] != "NAME":
                    kind = next(kind for kind, name in pages.COMMANDS.items() if name == words[0])
                    assert find(kind, words[1]) is not None


def experiments(file: Path, overrides: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of a file; of one with a [tune] table a trial of each case. Raise RayflError for a wrong one."""
    table, lists = with_overrides(read_table(file), overrides)
    if "tune" in table:
        tuning = Tuning(table, lists, overrides)
        return [tuning.trial(label, {}).experiment for label in tuning.cases]
    return [one.experiment for one in read_sweep(file, overrides) or ()] or [read(file, overrides)]


def settings_exist(command: click.Command, context: click.Context, words: list[str]) -> None:
    """The experiment of a command, where it is one that is there, is valid with the command's settings."""
    values, _, _ = command.make_parser(context).parse_args(list(words))
    given, overrides = values.get("file"), [word for word in words if re.match(r"[a-z_.]+=", word)]
    if not isinstance(given, str) or Path(given).name in ("FILE", "NAME", "mine.toml", "experiment.toml", "best.toml"):
        return
    file = experiment_file(Path(given))
    expected = ("unknown key",) if "keep_rato" in "".join(overrides) else ()
    try:
        assert experiments(file, overrides)
    except ValueError as error:
        assert any(word in str(error) for word in expected), (words, error)
    else:
        assert not expected


def test_the_table_of_commands_is_whole():
    page = text_of(DOCS / "reference" / "commands.md")
    shown = set(re.findall(r"^\| `rayfl (\w+)", page, flags=re.MULTILINE))
    shown |= {
        "models",
        "tasks",
        "datasets",
        "partitions",
        "compressors",
        "topologies",
        "selections",
        "schedules",
        "wrappers",
        "metrics",
    }
    assert shown == set(main.commands)
    page = text_of(DOCS / "benchmarks.md")
    assert set(re.findall(r"^\| `python -m benchmarks (\w+)", page, flags=re.MULTILINE)) == set(benchmarks.commands)
    made = pages.commands_section()
    for name, command in main.commands.items():
        assert f"## rayfl {name}\n" in made
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.opts[0] in made


def test_the_mistake_shown_gets_the_sentence_shown():
    page = text_of(DOCS / "reference" / "experiment.md")
    command, sentence = re.findall(r"\$ rayfl (run .*)\n(rayfl: .*)\n", page)[0]
    arguments = [str(ROOT / word) if word.endswith(".toml") else word for word in command.split()]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and result.stderr.strip() == sentence


# Settings.


def merged(piece: dict[str, Any]) -> dict[str, Any]:
    """A piece of an experiment as one: what is chosen by name takes the place of the base's, the rest goes into it."""
    whole = dict(BASE)
    for key, value in piece.items():
        joins = isinstance(value, dict) and key not in CHOSEN
        whole[key] = {**whole.get(key, {}), **value} if joins else value
    method = whole["method"]
    kind = find(Method, method["name"] if isinstance(method, dict) else method)
    return {"topology": "ring", **whole} if kind.gather and issubclass(kind, PeerHalf) else whole


def test_every_table_of_settings_is_valid():
    for page in PAGES:
        with folder_of(page) as folder:
            for block in blocks(text_of(page), "toml"):
                piece = tomllib.loads(block.text)
                if block.title == "claims.toml":
                    assert Paper(**piece).claim
                if block.title in OTHER_FILES:
                    continue
                file = folder / (block.title or "piece.toml")
                if not block.title:
                    file.write_text(toml.dumps(merged(piece)))
                assert experiments(file), block.text


def test_the_experiment_shown_is_valid_with_its_commented_settings_too():
    (shown,) = [one.text for one in blocks(text_of(DOCS / "reference" / "experiment.md"), "toml")]
    experiment = Experiment(**tomllib.loads(shown))
    assert experiment.method.name == "fedpse" and experiment.clients.count == 10
    optional = re.sub(r"^# (?=[\[a-z])", "", shown, flags=re.MULTILINE)
    table: dict[str, Any] = tomllib.loads(optional) | {"method": {"name": "fedavg"}}
    experiment = Experiment(**table)
    assert experiment.clients.per_round == 5 and experiment.runtime.actors == 4 and experiment.uplink.name == "feedback"


# Programs.


# Any: settings.
def small(function: Any, given: Any = None, *overrides: str, **settings: Any) -> Any:
    """`rayfl.run` and its like for one round, in this process."""
    tiny = {"rounds": 1, "runtime.executor": "inline", "output.report": False}
    return function(given, *overrides, progress=False, **{**settings, **tiny})


def test_every_program_shown_is_one():
    for page in PAGES:
        with folder_of(page) as folder, pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(rayfl, "run", partial(small, rayfl.run))
            monkeypatch.syspath_prepend(folder)
            for block in blocks(text_of(page), "python"):
                tree = ast.parse(block.text)
                if not block.title:
                    continue
                (folder / block.title).write_text(block.text)
                names: dict[str, Any] = {"__name__": block.title.removesuffix(".py")}
                exec(compile(tree, block.title, "exec"), names)
                for name, found in names.items():
                    if name.startswith("test_") and inspect.isfunction(found):
                        found()


def test_every_experiment_shown_plays_a_round():
    for page in PAGES:
        with folder_of(page) as folder:
            for block in blocks(text_of(page), "python"):
                # It makes the data of one of the experiments.
                if "np.savez(" in block.text:
                    exec(block.text, {})
            for block in blocks(text_of(page), "toml"):
                if not block.title or block.title in OTHER_FILES or "fashion" in block.text:
                    continue
                # The first of a sweep stands for the others, which are valid.
                records, _ = play(prepare(experiments(folder / block.title, ["rounds=1"])[0]))
                assert len(records) == 1 and records[0].metrics


# What there is.


def test_nothing_is_left_to_be_filled_in():
    for page in PAGES:
        assert re.findall(r"\b[A-Z]+_(?:TABLE|OUTPUT|SOURCE)\b|\bTODO\b", text_of(page)) == []


def test_each_page_of_results_begins_with_the_count_of_its_verdicts():
    index = text_of(DOCS / "results" / "index.md")
    rows = Counter[str]()
    for name in verdicts.PARTS:
        page = DOCS / "results" / f"{name}.md"
        text = text_of(page)
        with naming(page):
            for block in verdicts.blocks(name).values():
                assert block in text, "run python -m docs.generate.verdicts"
            assert (DOCS / "results" / f"{name}.svg").is_file()
            sums = verdicts.total(verdicts.counted(name))
            row = "".join(f" {number} |" for number in (sums.total(), *map(sums.__getitem__, verdicts.VERDICTS)))
            assert re.search(rf"^\| .*\]\({name}\.md\) \|{re.escape(row)}$", index, flags=re.MULTILINE)
            rows += sums
    counts = (
        f"Of {rows.total()} rows {rows['reproduced']} are reproduced, {rows['refuted']} refuted, {rows['equal']} equal"
    )
    for page in (text_of(DOCS.parent / "README.md"), index):
        assert counts in re.sub(r"\s+", " ", page)
