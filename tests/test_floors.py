"""Inside rayfl each room stands on a floor and imports only what lies below it, and no files import each other in a
circle: every file is read."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "rayfl"
FLOORS = (
    {"errors", "version", "own_packages"},
    {"toml", "untyped"},
    {"settings"},
    {"determinism", "limits", "tree"},
    {"choices"},
    {"schedules", "selections"},
    {"data", "topology", "population"},
    {"models", "compress", "metrics"},
    {"network"},
    {"tasks"},
    {"task", "gather"},
    {"methods"},
    {"rounds"},
    {"wrappers"},
    {"run_directory"},
    {"experiment"},
    {"report", "testing"},
)
"""The rooms, from the ground up: `rayfl/report/` or `rayfl/task.py`."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
DOOR = (ROOT / "__init__.py", ROOT / "__main__.py")
"""They lead to what a program or a user asks for, on the floors above, when it is asked for."""
FILES = sorted(path for path in ROOT.rglob("*.py") if path not in DOOR)


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str) -> Iterator[str]:
    """The full names that `source` imports, anywhere in it: modules, and what is taken from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(source: str) -> Iterator[str]:
    """The rooms of rayfl that `source` imports from."""
    yield from (name.split(".")[1] for name in imported(source) if name.startswith("rayfl."))


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def test_every_room_has_a_floor_and_every_floor_its_rooms():
    assert {room(path) for path in FILES} == set(FLOOR)


def test_the_reader_finds_every_form_of_import():
    source = "import rayfl.data.batches\nfrom rayfl import tree\ndef f():\n    from rayfl.task import BoundTask"
    assert list(rooms(source)) == ["data", "tree", "task"]


def test_imports_lead_down():
    upward = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in FILES
        for other in rooms(path.read_text(encoding="utf-8"))
        if other != room(path) and FLOOR[other] >= FLOOR[room(path)]
    ]
    assert not upward, "the imported room is no floor below"


def test_no_files_import_each_other_in_a_circle():
    files = {module(path): path for room in ("rayfl", "actors", "jobs") for path in (ROOT.parent / room).rglob("*.py")}
    # Every file needs rayfl itself, which needs no file before somebody asks it for one.
    del files["rayfl"]
    needs: dict[str, set[str]] = {}
    for name, path in files.items():
        found = {part for one in imported(path.read_text(encoding="utf-8")) for part in (one, one.rpartition(".")[0])}
        needs[name] = {one for one in found if one in files} - {name}
    # CycleError names the files of the first circle.
    assert set(TopologicalSorter(needs).static_order()) == set(files)
