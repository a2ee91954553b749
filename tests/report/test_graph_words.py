"""A run's graph on its page."""

import json
import tracemalloc
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from jobs.single import run
from rayfl.experiment.experiment import Experiment
from rayfl.report.graph_words import graph_words
from rayfl.report.groups import groups
from rayfl.run_directory.description import read_origin
from rayfl.run_directory.record import read_run
from tests.refusals import mentions, refused


def played(folder: Path, topology: Any, method: str = "dpsgd", **clients: Any):
    tables: dict[str, Any] = {
        "name": "peers",
        "rounds": 3,
        "data": "digits",
        "partition": "iid",
        "model": "logistic",
        "method": method,
        "clients": {"count": 4, **clients},
        "topology": topology,
        "evaluation": {"every": 0},
        "runtime": {"executor": "inline"},
        "output": {"report": False, "save_models": False},
    }
    return read_run(run(Experiment(**tables), folder / "run"))


def test_the_page_has_the_graph_and_its_facts(tmp_path: Path):
    record = played(tmp_path, {"name": "random", "degree": 2})
    words = graph_words(groups([record]))
    assert mentions(words, "4 peers") and mentions(words, "from 2")
    assert set(read_origin(record.directory)) >= {"command", "started", "host"}
    names = {name for name in record.metrics["name"].to_pylist() if name.startswith("graph/")}
    assert names == {"graph/mean_degree", "graph/max_degree", "graph/connected", "graph/spectral_gap"}


def test_a_graph_is_read_from_its_copy_and_not_without(tmp_path: Path):
    path = tmp_path / "star.txt"
    path.write_text("0 1\n0 2\n0 3\n")
    record = played(tmp_path, {"name": "file", "path": str(path)})
    path.unlink()
    assert mentions(graph_words(groups([record])), "4 peers")
    (copy,) = (record.directory / "files").iterdir()
    copy.unlink()
    assert graph_words(groups([record])) == ""


PLUGIN = """
from rayfl.topology.graphs import Ring

class Circle(Ring):
    name = "circle-of-this-test"
"""


def test_a_page_runs_no_code_of_a_run_directory(tmp_path: Path):
    (tmp_path / "circles.py").write_text(PLUGIN)
    record = played(tmp_path, {"name": f"{tmp_path}/circles.py:Circle"})
    assert graph_words(groups([record]))
    (copy,) = (record.directory / "files").glob("*.py")
    copy.write_text(f"{PLUGIN}\nopen({str(tmp_path / 'was-run')!r}, 'w')\n")
    assert graph_words(groups([record])) == ""
    assert not (tmp_path / "was-run").exists()


def test_runs_without_peers_have_no_graph(tmp_path: Path):
    assert graph_words(groups([played(tmp_path, None, "fedavg")])) == ""


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        (("clients", "count"), 60_000, None),
        (("clients", "count"), 1e4, ["clients.count=10000.0", "int"]),
        (("clients",), 4, ["clients.count=None", "int"]),
        (("seed",), [1], ["seed=[1]", "int"]),
        (("rounds",), "3", ["rounds='3'", "int"]),
        (("topology",), ["ring"], ["topology.name=None", "str"]),
        (("topology", "name"), 7, ["topology.name=7", "str"]),
    ],
)
def test_a_strangers_experiment_neither_fills_the_memory_nor_ends_in_a_traceback(
    tmp_path: Path, path: tuple[str, ...], value: object, names: list[str] | None
):
    record = played(tmp_path, "ring")
    settings = json.loads((record.directory / "experiment.json").read_text())
    reduce(dict.__getitem__, path[:-1], settings)[path[-1]] = value
    (record.directory / "experiment.json").write_text(json.dumps(settings))
    strange = groups([read_run(record.directory)])
    if names is None:
        tracemalloc.start()
        assert graph_words(strange) == ""
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()
        return
    with refused(names=[*names, "experiment.json"]):
        graph_words(strange)


def test_unseen_clients_are_no_peers(tmp_path: Path):
    assert mentions(graph_words(groups([played(tmp_path, "ring", "dpsgd_ft", unseen=0.25)])), "3 peers")
