"""Imports run one way, benchmarks -> jobs -> actors -> rayfl, and of the packages only `actors` imports ray.

Every file is read, and rayfl is imported.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "rayfl": {"ray", "actors", "jobs", "benchmarks", "tests"},
    "actors": {"jobs", "benchmarks", "tests"},
    "jobs": {"ray", "benchmarks", "tests"},
    "benchmarks": {"tests"},
}
DOOR = {"rayfl/__init__.py", "rayfl/__main__.py"}
"""`rayfl.run` and its like are looked up in jobs, once they are asked for, and `python -m rayfl` calls the command."""
CLAIM = Path("rayfl/own_packages.py")
"""Imports `actors` from beside rayfl, before anything imports it from elsewhere."""
ADAPTERS = {Path("rayfl/run_directory/trackers") / f"{name}.py" for name in ("wandb_run", "tensorboard_events")}
"""They load the trackers' own packages, once a run asks for one."""
FILES = [path.relative_to(ROOT) for layer in FORBIDDEN for path in sorted((ROOT / layer).rglob("*.py"))]


def imported(source: str) -> set[str]:
    """The top-level names of what `source` imports absolutely, anywhere in it, `import_module("...")` included."""
    return {name.partition(".")[0] for node in ast.walk(ast.parse(source)) for name in _names(node)}


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield node.module or ""
    elif isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name, importing = node.args[0], {"import_module", "__import__"}
        if called in importing and isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ray.data as data, os", {"ray", "os"}),
        ("def late():\n    from ray.util import placement_group", {"ray"}),
        ("if TYPE_CHECKING:\n    from actors.ray_executor import RayExecutor", {"actors"}),
        ("importlib.import_module('jobs.cli')", {"jobs"}),
        ("__import__('ray')", {"ray"}),
        ("from . import ray\nfrom rayfl import tree", {"rayfl"}),
        ("text = 'import ray'", set()),
    ],
)
def test_the_reader_finds_every_form_of_import(source: str, expected: set[str]) -> None:
    assert imported(source) == expected


def test_every_layer_has_files() -> None:
    assert {path.parts[0] for path in FILES} == set(FORBIDDEN)


def test_imports_run_one_way() -> None:
    upward = {}
    for path in FILES:
        names = imported((ROOT / path).read_text(encoding="utf-8"))
        forbidden = FORBIDDEN[path.parts[0]] - ({"jobs"} if path.as_posix() in DOOR else set())
        upward[str(path)] = names & forbidden
    assert not {path: names for path, names in upward.items() if names}, "these files import a layer above their own"


@pytest.mark.slow
def test_importing_all_of_rayfl_brings_neither_ray_nor_a_higher_layer() -> None:
    modules = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if path.parts[0] == "rayfl" and path.name != "__main__.py" and path not in {CLAIM, *ADAPTERS}
    ]
    program = (
        "import importlib, sys\n"
        "import rayfl\n"
        "assert {'run', 'load', 'sweep'} <= set(dir(rayfl))\n"
        "assert not {'numpy', 'torch', 'pandas', 'ray', 'actors', 'jobs'} & set(sys.modules)\n"
        "rayfl.load\n"
        "assert 'torch' not in sys.modules\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "assert set(sys.argv[1:]) <= set(sys.modules)\n"
        "print(sorted({'ray', 'actors', 'jobs', 'mlflow', 'wandb', 'tensorboard'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
