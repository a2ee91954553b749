"""What is there is found by its name: a method by its file's, everything else by its class's."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import rayfl.methods
from rayfl.experiment import methods_registry
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
    """The registry looks again, before and after."""
    methods_registry.methods.cache_clear()
    yield monkeypatch
    methods_registry.methods.cache_clear()


def test_a_new_file_is_a_new_method(forgetful: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "afternoon.py").write_text(NEW_METHOD, encoding="utf-8")
    forgetful.setattr(rayfl.methods, "__path__", [*rayfl.methods.__path__, str(tmp_path)])
    try:
        found = methods_registry.methods()
        assert found["afternoon"].__name__ == "Renamed"
        assert methods_registry.method("afternoon").__module__ == "rayfl.methods.afternoon"
        assert {"fedavg", "fedpse", "local"} < set(found)
    finally:
        sys.modules.pop("rayfl.methods.afternoon", None)


def test_every_file_is_a_method_and_the_seams_are_none():
    files = {path.stem for path in Path(rayfl.methods.__path__[0]).glob("*.py")} - {"__init__", "base"}
    assert set(methods_registry.methods()) == files
    assert methods_registry.method("fedavg") is FedAvg


def module_with(*names: str) -> ModuleType:
    """A module with classes of these names of its own, and FedAvg imported."""
    module = ModuleType("rayfl.methods.of_this_test")
    module.FedAvg = FedAvg  # type: ignore[attr-defined]
    for name in names:
        setattr(module, name, type(name, (FedAvg,), {"__module__": module.__name__}))
    return module


def test_one_method_a_file():
    assert methods_registry.method_of(module_with("One")).__name__ == "One"
    for names in ([], ["One", "Two"]):
        with pytest.raises(AssertionError, match=f"must define exactly one method, and defines {len(names)}"):
            methods_registry.method_of(module_with(*names))


def test_every_method_says_where_it_comes_from():
    for name, method in methods_registry.methods().items():
        assert issubclass(method, Method)
        assert method.paper, name
        assert (sys.modules[method.__module__].__doc__ or "").strip(), name
