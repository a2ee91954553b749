"""Inside rayfl each room stands on a floor and imports only what lies below it: every file is read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "rayfl"
FLOORS = (
    {"settings", "determinism", "tree"},
    {"plugins"},
    {"choices"},
    {"data", "topology", "population"},
    {"models", "compress"},
    {"task", "gather"},
    {"methods"},
    {"rounds"},
    {"run_directory"},
    {"experiment"},
    {"report"},
)
"""The rooms of DESIGN.md, from the ground up: `rayfl/report/` or `rayfl/task.py`."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str) -> Iterator[str]:
    """The rooms that `source` imports from, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("rayfl."))


def test_every_room_has_a_floor_and_every_floor_its_rooms():
    assert {room(path) for path in FILES} == set(FLOOR)


def test_the_reader_finds_every_form_of_import():
    source = "import rayfl.data.batches\nfrom rayfl import tree, __version__\ndef f():\n    from rayfl.task import Task"
    assert list(imported(source)) == ["data", "tree", "__version__", "task"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_lead_down(path: Path):
    own = room(path)
    for other in imported(path.read_text(encoding="utf-8")):
        if other in (own, "__version__"):
            continue
        assert FLOOR[other] < FLOOR[own], f"{path.relative_to(ROOT)} imports {other}, which is no floor below {own}"
