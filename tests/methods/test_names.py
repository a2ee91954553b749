"""A method of ours is called as its file is, and a file has one."""

import sys
from collections import Counter
from pathlib import Path

import pytest

import rayfl.methods
from rayfl.choices.kinds import find, named, scanned
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
    scanned.cache_clear()
    yield monkeypatch
    scanned.cache_clear()


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
    files = {path.stem for path in Path(rayfl.methods.__path__[0]).glob("*.py")} - {"__init__", "base", "hook_types"}
    assert set(named(Method)) == files
    assert find(Method, "fedavg") is FedAvg


def test_a_class_that_was_made_as_the_program_ran_is_no_method_of_ours(forgetful: pytest.MonkeyPatch):
    made = type("Made", (FedAvg,), {"__module__": FedAvg.__module__})
    assert find(Method, "fedavg") is FedAvg and made not in named(Method).values()


def test_one_method_a_file():
    pending, found = [Method], set[type]()
    named(Method)
    while pending:
        below = pending.pop().__subclasses__()
        pending += below
        # A class with two parents is met twice; one that was made as the program ran is in no file.
        found |= {kind for kind in below if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind}
    modules = Counter(kind.__module__ for kind in found if kind.__module__.rpartition(".")[0] == "rayfl.methods")
    assert [module for module, count in modules.items() if count > 1] == []


def test_every_method_says_where_it_comes_from():
    for name, method in named(Method).items():
        assert issubclass(method, Method)
        assert method.paper, name
