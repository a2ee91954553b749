"""A method of ours is called as its file is, and a file has one."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import rayfl.methods
from rayfl.choices.kinds import find, named
from rayfl.methods.base import Method
from rayfl.methods.server.fedavg import FedAvg
from rayfl.metrics.base import Metric
from tests.refusals import refused

NEW_METHOD = '''
from rayfl.methods.server.fedavg import FedAvg

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


@pytest.fixture
def written(forgetful: pytest.MonkeyPatch, tmp_path: Path):
    """Writes a method's file at a path below rayfl/methods/, in folders that are packages; afterwards it is gone."""
    forgetful.setattr(rayfl.methods, "__path__", [*rayfl.methods.__path__, str(tmp_path)])
    before = {*sys.modules}

    def write(path: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.parents[: len(Path(path).parents) - 1]:
            (folder / "__init__.py").touch()
        file.write_text(NEW_METHOD, encoding="utf-8")

    yield write
    for name in [name for name in sys.modules if name.startswith("rayfl.methods.") and name not in before]:
        module = sys.modules.pop(name)
        if hasattr(module, "Renamed"):
            # A class is forgotten with the last that refers to it; until then it stays a subclass of FedAvg.
            module.Renamed.__module__ = "forgotten"


@pytest.mark.parametrize("path", ["afternoon.py", "weekdays/afternoon.py", "weekdays/monday/afternoon.py"])
def test_a_new_file_is_a_new_method(written: Callable[[str], None], path: str):
    written(path)
    found = named(Method)["afternoon"]
    assert found.__name__ == "Renamed" and find(Method, "afternoon") is found
    assert found.__module__ == f"rayfl.methods.{path.removesuffix('.py').replace('/', '.')}"
    assert {"fedavg", "fedpse", "local"} < set(named(Method))


def test_two_files_of_one_name_are_refused(written: Callable[[str], None]):
    written("weekdays/afternoon.py")
    written("holidays/afternoon.py")
    with pytest.raises(AssertionError, match="are called 'afternoon'"):
        named(Method)


def test_every_file_is_a_method_and_the_seams_are_none():
    seams = {"__init__", "base", "capabilities", "hook_types"}
    paths = [path for path in Path(rayfl.methods.__path__[0]).rglob("*.py") if path.parent.name != "shared"]
    assert sorted(named(Method)) == sorted(path.stem for path in paths if path.stem not in seams)
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


def test_a_method_is_imported_with_or_without_its_family():
    short = importlib.import_module("rayfl.methods.fedavg")
    from rayfl.methods.server import fedavg

    assert short is fedavg and fedavg.__name__ == "rayfl.methods.server.fedavg"
    assert fedavg.__spec__ is not None and fedavg.__spec__.name == fedavg.__name__
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rayfl.methods.wrapper")


def test_old_names_are_refused_with_the_new_ones():
    with refused(names=["judges", "takes_targets"]):
        type("Mine", (Metric,), {"judges": ("classes",)})
    with refused(names=["for_newcomers", "capabilities.newcomer"]):
        type("Mine", (FedAvg,), {"for_newcomers": lambda self: "model"})
    with refused(names=["Samples", "Examples"]):
        from rayfl.data.datasets import Samples  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
