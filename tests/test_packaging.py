"""What is declared is what is used, the constraints cover it exactly, and the wheel holds all of it."""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import rayfl
from tests.test_layers import imported

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rayfl", "actors", "jobs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
DECLARED = [*DEPENDENCIES, *(requirement for extra in EXTRAS.values() for requirement in extra)]
THIRD_PARTY = [requirement for requirement in DECLARED if requirement.name != "rayfl"]


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {name: Version(version) for name, version in pins}


def test_constraints_are_exact_sorted_and_hold_on_any_machine() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    # A local version (+cpu), a path, an address, a marker or an extra would all fail this.
    assert [line for line in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    names = [line.partition("==")[0] for line in pins]
    assert names == sorted(set(names))
    assert all(name == canonicalize_name(name) for name in names)


@pytest.mark.parametrize("requirement", THIRD_PARTY, ids=str)
def test_requirements_have_an_open_lower_bound_that_the_constraint_meets(requirement: Requirement) -> None:
    # Ray has an upper bound too: rayfl uses private parts of it, which the versions in between were tried with.
    bounds = {">=", "<"} if requirement.name == "ray" else {">="}
    assert {specifier.operator for specifier in requirement.specifier} == bounds
    assert constraints()[canonicalize_name(requirement.name)] in requirement.specifier


def test_constraints_cover_what_the_requirements_bring_along() -> None:
    # What a package pins exactly (torch its CUDA libraries) needs no constraint of ours.
    pinned = constraints()
    open_ends: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [*DEPENDENCIES, *EXTRAS["test"], *(EXTRAS["docs"] if importlib.util.find_spec("mkdocs") else ())]
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or any(specifier.operator == "==" for specifier in requirement.specifier):
            continue
        seen.add((name, extras))
        if name not in pinned:
            open_ends.add(name)
            continue
        for line in importlib.metadata.requires(name) or []:
            below = Requirement(line)
            if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                queue.append(below)
    assert open_ends == set()


@functools.cache
def imported_in(folder: str) -> set[str]:
    """The modules that the files of a folder import."""
    paths = [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT / "benchmarks" / "peers"]
    return {name for path in paths for name in imported(path.read_text(encoding="utf-8"))}


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """The installed distributions by top-level module."""
    return importlib.metadata.packages_distributions()


def undeclared(folders: tuple[str, ...], requirements: list[Requirement]) -> set[str]:
    """The third-party modules that files in `folders` import and no requirement provides.

    Programs for other simulators run in environments of their own (`python -m benchmarks rounds --peers`).
    """
    names, provided = set().union(*map(imported_in, folders)), distributions()
    declared = {canonicalize_name(requirement.name) for requirement in requirements}
    own = {*PACKAGES, "benchmarks", "docs", "tests", *sys.stdlib_module_names}
    return {name for name in names - own if not declared & {canonicalize_name(n) for n in provided.get(name, [name])}}


@pytest.mark.slow
def test_every_import_of_the_packages_is_a_declared_dependency() -> None:
    # Where those of extras are imported, their absence gets a sentence; rayfl.testing is run by pytest.
    extras = [
        one for name in ("tff", "wandb", "metrics", "adapters", "privacy", "tune", "test") for one in EXTRAS[name]
    ]
    # NVML measures energy where a machine's administrator has installed it.
    assert undeclared(PACKAGES, [*DEPENDENCIES, *extras]) == {"pynvml"}
    assert undeclared(PACKAGES, DEPENDENCIES) == {
        "pynvml",
        *("h5py", "wandb", "torchmetrics", "peft", "pytest", "transformers", "opacus", "optuna"),
    }
    assert "torch" in undeclared(PACKAGES, [r for r in DEPENDENCIES if r.name != "torch"])


@pytest.mark.slow
def test_every_import_of_the_tests_is_declared_in_the_test_extra() -> None:
    assert undeclared(("tests",), [*DEPENDENCIES, *EXTRAS["test"]]) == set()


def test_every_import_of_the_documentation_is_declared() -> None:
    assert undeclared(("docs",), [*DEPENDENCIES, *EXTRAS["test"], *EXTRAS["docs"]]) == set()


def test_every_import_of_the_benchmarks_is_declared() -> None:
    assert undeclared(("benchmarks",), DEPENDENCIES) == set()


def test_the_command_is_rayfls_own_whatever_else_is_called_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs import cli

    called = []
    monkeypatch.setattr(cli, "main", lambda **options: called.append(options))
    module, _, attribute = PROJECT["scripts"]["rayfl"].partition(":")
    assert module.partition(".")[0] == "rayfl"
    getattr(importlib.import_module(module), attribute)()
    assert called == [{"prog_name": "rayfl"}]


def built(target: str, folder: Path) -> Path:
    """The wheel or the sdist, in `folder`. `make dist` builds it too, and runs the demo from the wheel."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.iterdir()
    return file


def test_the_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    wheel = built("wheel", tmp_path)
    assert wheel.name == f"rayfl-{rayfl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        scripts = archive.read(f"rayfl-{rayfl.__version__}.dist-info/entry_points.txt").decode()
    present = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in packed if ".dist-info/" not in name} == present
    assert f"rayfl-{rayfl.__version__}.dist-info/licenses/LICENSE" in packed
    assert "rayfl = rayfl.__main__:main" in scripts
    # What the demo needs beside code, and what marks the packages as typed.
    assert {f"{package}/py.typed" for package in PACKAGES} < packed
    assert {"jobs/experiments/demo.toml", "rayfl/data/optdigits/images-idx3-ubyte.gz"} < packed
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in packed)


@pytest.mark.slow
def test_the_sdist_builds_and_tests_as_the_checkout_does(tmp_path: Path) -> None:
    with tarfile.open(built("sdist", tmp_path)) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt", ".ci/dist"):
        assert name in packed, name
    for folder in (*PACKAGES, "tests", "benchmarks"):
        present = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert present <= packed
    assert "rayfl/data/optdigits/images-idx3-ubyte.gz" in packed
    assert not any(name.startswith(("runs/", "dist/", "site/", ".venv/")) or "__pycache__" in name for name in packed)
