"""`python -m benchmarks fuzz`: random experiments that must not depend on how they are played."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fuzz_choices as choices
from benchmarks.fuzz import parsed
from benchmarks.fuzz_choices import LATEST, of_version
from benchmarks.fuzz_experiments import Draws, additions, drawn, named, plain
from rayfl import toml
from rayfl.choices import kinds
from rayfl.choices.kinds import Choice
from rayfl.compress.base import Compressor
from rayfl.data.partition import PartitionScheme
from rayfl.errors import RayflError
from rayfl.methods.base import Method
from rayfl.schedules.base import Schedule
from rayfl.selections.base import Selection
from rayfl.topology.graphs import Topology
from rayfl.wrappers.base import Wrapper
from tests.benchmarks.commands import benchmark
from tests.refusals import refused


def test_twenty_random_experiments_have_the_same_bits_however_they_are_played(tmp_path: Path):
    result = benchmark("fuzz", "--seeds", "1-20", "--alone", "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())["experiments"]
    # Calm, stopped, killed, with other numbers of rounds between evaluations, on two workers and on three.
    assert [row["plays"] for row in found] == [6] * 20


def test_a_seed_makes_the_same_experiment_for_ever():
    """The hash of what version 1 draws for 200 seeds, as it was when version 1 was made. If something is to be drawn
    that was not then, it is a new version."""
    drawings = []
    for draws in (Draws(seed, version=1) for seed in range(200)):
        # A setting that a method needs here is left out once the method has lost it.
        tables = plain(draws)
        drawings.append([{**tables, "method": tables["method"]["name"]}, additions(draws)])
    assert hashlib.sha256(json.dumps(drawings).encode()).hexdigest()[:16] == "62b8b594a6d8cbf3"


def test_a_name_makes_the_experiment_again_whatever_is_refused():
    draws = Draws(3)
    experiment, everything = drawn(draws), drawn(draws, lambda tables: False)
    assert named(experiment.name, LATEST) == experiment and named(everything.name, LATEST) == everything
    assert len(experiment.kept) < len(everything.kept) == len(additions(draws))
    assert named("3.0", LATEST).tables == plain(draws)
    for name in ("3.", "3.fffffffffff", "-3.1"):
        with pytest.raises(RayflError, match=name.replace(".", r"\.")):
            named(name, LATEST)


# Any: values of choices.
def names(value: Any) -> set[str]:
    """All names in tables."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, dict):
        return {value["name"]} | (names(value["inner"]) if "inner" in value else set())
    return {name for each in value for name in names(each)}


@pytest.mark.parametrize(
    ("kind", "lists", "left_out"),
    [
        (Method, [choices.METHODS], set()),
        (Compressor, [choices.UPLINKS, choices.DOWNLINKS], set()),
        # What a file says.
        (PartitionScheme, [choices.PARTITIONS], {"file"}),
        (Schedule, [choices.SCHEDULES, choices.PEER_SCHEDULES], {"synchronous"}),
        (Selection, [choices.SELECTIONS], {"uniform"}),
        # Graphs in files.
        (Topology, [choices.TOPOLOGIES], {"file", "file-by-round"}),
        (Wrapper, [choices.WRAPPERS], set()),
    ],
)
def test_everything_that_rayfl_has_is_drawn(kind: type[Choice], lists: list[choices.Choices], left_out: set[str]):
    """What is new goes under a new version of the generator: see benchmarks/fuzz_choices.py."""
    drawn_names = {name for each in lists for name in names(of_version(each, LATEST))}
    assert drawn_names == {*kinds.named(kind)} - left_out


def test_versions_add_and_take_nothing_away():
    two = {1: ("a", "b"), 3: ("c",)}
    assert [of_version(two, version) for version in (1, 2, 3)] == [["a", "b"], ["a", "b"], ["a", "b", "c"]]


# It keeps a count of its own, which no checkpoint has.
FORGETFUL = """
from rayfl.selections.base import Selection


class Forgetful(Selection):
    def choose(self, state, seen, available, num_wanted, generator):
        calls[0] += 1
        return [int(available[calls[0] % len(available)])]


calls = [0]
"""


def test_a_difference_is_found_made_smaller_and_can_be_repeated(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FORGETFUL)
    tables = {
        **plain(Draws(1, version=1)),
        "rounds": 3,
        "method": {"name": "fedavg"},
        "clients": {"count": 4, "per_round": 1},
    }
    tables |= {
        "selection": f"{tmp_path}/mine.py:Forgetful",
        "uplink": {"name": "qsgd"},
        "splits": {"heldout_ratio": 0.2},
    }
    (tmp_path / "case.toml").write_text(toml.dumps(tables))
    result = benchmark("fuzz", "--file", tmp_path / "case.toml", "--json", tmp_path / "found.json")
    assert result.exit_code == 1 and "1 with another bit" in result.output
    assert f"python -m benchmarks fuzz --file {tmp_path}/case.toml" in result.output
    (row,) = json.loads((tmp_path / "found.json").read_text())["experiments"]
    assert row["found"].startswith("stopped: records/") and "mine.py" in row["toml"]
    assert "qsgd" not in row["toml"] and "heldout_ratio" not in row["toml"]


def test_an_error_is_a_finding(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FORGETFUL.replace("calls[0] +=", "calls[9] +="))
    tables = {**plain(Draws(1, version=1)), "method": {"name": "fedavg"}, "clients": {"count": 4, "per_round": 1}}
    (tmp_path / "case.toml").write_text(toml.dumps(tables | {"selection": f"{tmp_path}/mine.py:Forgetful"}))
    result = benchmark("fuzz", "--file", tmp_path / "case.toml", "--json", tmp_path / "found.json")
    assert result.exit_code == 1 and "Forgetful.choose: IndexError" in result.output


def test_what_cannot_be_played_is_refused():
    assert parsed("3-5,9,7.1f") == ["3", "4", "5", "9", "7.1f"]
    for arguments in (["--seeds", "5-3"], ["--seeds", "a"], ["--seeds", "1-1000000"], ["--generator", "99"]):
        refused(benchmark("fuzz", *arguments), names=arguments)
