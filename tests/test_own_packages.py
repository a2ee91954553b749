"""A project's own folders `jobs/` and `actors/` do not stand in the way of rayfl's packages of these names."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from ray import cloudpickle

import rayfl
from actors.client import ClientActor
from actors.coordinator import Coordinator
from rayfl.own_packages import claim
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder in which `import jobs` and `import actors` find packages that are not ours."""
    for name in ("jobs", "actors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the project has one of that name')\n")
    return tmp_path


@pytest.mark.slow
def test_rays_workers_programs_and_the_command_find_our_packages(project: Path):
    # Ray hands a worker the class pickled by value, and puts the driver's directory before all others there.
    for number, actor in enumerate((ClientActor, Coordinator)):
        pickled = cloudpickle.dumps(actor.__ray_metadata__.modified_class)  # type: ignore[attr-defined]
        (project / str(number)).write_bytes(pickled)
    program = """
import runpy, sys
from ray import cloudpickle

for name in "01":
    print(cloudpickle.loads(open(name, "rb").read()).__name__, sys.modules["actors"].__file__)
    for module in [name for name in sys.modules if name.partition(".")[0] in ("actors", "rayfl")]:
        del sys.modules[module]
import rayfl
print(rayfl.run.__module__, sys.modules["actors"].__file__, flush=True)
sys.argv = ["rayfl", "--version"]
runpy.run_module("rayfl", run_name="__main__")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(project), str(ROOT)))}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ours = ROOT / "actors" / "__init__.py"
    expected = [f"{name} {ours}" for name in ("ClientActor", "Coordinator", "jobs.python_api")]
    assert done.stdout.splitlines() == [*expected, f"rayfl, version {rayfl.__version__}"]


def test_another_package_of_the_name_that_was_imported_is_named(monkeypatch: pytest.MonkeyPatch):
    claim("jobs")
    other = ModuleType("jobs")
    other.__path__ = ["/elsewhere/jobs"]
    monkeypatch.setitem(sys.modules, "jobs", other)
    with refused(names=["/elsewhere/jobs", "another", "rename"], error=ImportError):
        claim("jobs")
