"""A method of ours is called as its file is, and a file has one."""

import sys
from collections import Counter
from pathlib import Path

import pytest

import rayfl.methods
from rayfl.choices.kinds import find, named
from rayfl.methods.base import Method
from rayfl.methods.fedavg import FedAvg

NEW_METHOD = '''
from rayfl.methods.fedavg import FedAvg

LIMIT = 3


class Renamed(FedAvg):
    """A method that somebody wrote this afternoon."""
'''


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch):
    """The lookup looks again, before and after."""
    named.cache_clear()
    yield monkeypatch
    named.cache_clear()


def test_a_new_file_is_a_new_method(forgetful: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "afternoon.py").write_text(NEW_METHOD, encoding="utf-8")
    forgetful.setattr(rayfl.methods, "__path__", [*rayfl.methods.__path__, str(tmp_path)])
    try:
        found = named(Method)["afternoon"]
        assert found.__name__ == "Renamed" and find(Method, "afternoon").__module__ == "rayfl.methods.afternoon"
        assert {"fedavg", "fedpse", "local"} < set(named(Method))
    finally:
        sys.modules.pop("rayfl.methods.afternoon", None)
        # A class is forgotten with the last that refers to it; until then it stays a subclass of FedAvg.
        found.__module__ = "forgotten"


def test_every_file_is_a_method_and_the_seams_are_none():
    seams = {"__init__", "base", "capabilities", "hook_types"}
    files = {path.stem for path in Path(rayfl.methods.__path__[0]).glob("*.py")} - seams
    assert set(named(Method)) == files
    assert find(Method, "fedavg") is FedAvg


def test_a_class_that_was_made_as_the_program_ran_is_no_method_of_ours(forgetful: pytest.MonkeyPatch):
    made = type("Made", (FedAvg,), {"__module__": FedAvg.__module__})
    assert find(Method, "fedavg") is FedAvg and made not in named(Method).values()


def test_one_method_a_file():
    ours = named(Method).values()
    pending, found = [Method], set()
    while pending:
        kinds = pending.pop().__subclasses__()
        pending += kinds
        found.update(kind for kind in kinds if kind in ours)
    modules = Counter(kind.__module__ for kind in found)
    assert set(modules.values()) == {1} and len(modules) == len(ours)


def test_every_method_says_where_it_comes_from():
    for name, method in named(Method).items():
        assert issubclass(method, Method)
        assert method.paper, name
