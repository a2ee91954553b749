"""Ray's private parts: which this Ray has, that one file alone knows them, and that a run goes on without them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors import ray_internals
from actors.errors import ClusterError
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.play_run import RunOutput, play_run
from tests.actors.toys import assert_same_run, experiment
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"\bray\._|_private\b|_raylet\b|_global_node|_system_config|(?<!get)_node_ip|default_worker")


def test_this_ray_has_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [part for part in ray_internals.PARTS if ray_internals.find(part) is None] == []
    assert len(ray_internals.PARTS) == 13
    assert ray_internals.system_config(a=1) == {"_system_config": {"a": 1}}
    monkeypatch.setenv(ray_internals.PLAIN, "1")
    assert [part for part in ray_internals.PARTS if ray_internals.find(part)] == []
    assert ray_internals.system_config(a=1) == {}


@pytest.mark.parametrize("mode", ["", "disabled", "token"])
def test_a_ray_that_cannot_get_a_token_is_refused_unless_its_user_says_so(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ray_internals.PLAIN, "1")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if mode:
        assert bool(ray_internals.new_token()) == (mode == "token")
    else:
        with refused(names=[f"{ray_internals.PLAIN}=1", "RAY_AUTH_MODE=token"], error=ClusterError):
            ray_internals.new_token()


def test_no_other_file_touches_a_private_part() -> None:
    files = [path for folder in ("actors", "jobs", "rayfl") for path in (ROOT / folder).rglob("*.py")]
    touching = [str(path.relative_to(ROOT)) for path in files if PRIVATE.search(path.read_text(encoding="utf-8"))]
    assert touching == ["actors/ray_internals.py"]


RUN = """
import os, sys
from pathlib import Path
{before}
from actors import driver, fork_server, ray_internals
from rayfl.experiment.prepare import prepare
from rayfl.run_directory.play_run import Listener
from tests.actors.toys import experiment, play_on_ray
import ray

def play():
    print(sum(ray_internals.find(part) is not None for part in ray_internals.PARTS))
    chosen = experiment("scaffold", runtime={"actors": 2, "num_cpus": 0.5})
    listener = Listener(lambda row, means: print(fork_server._begun is not None, bool(asked())))
    play_on_ray(chosen, prepare(chosen), Path(sys.argv[1]), listener)

def asked():
    # Whether this Ray asks for a token.
    from actors.session import _needs_no_token
    return not _needs_no_token(ray.get_runtime_context().gcs_address)

if __name__ == "__main__":
    play()
"""
WITHOUT = """
import ray, ray.cluster_utils, types
from actors.ray_internals import PARTS
for part in PARTS:
    # Ray's own code has these names by now. Who asks for them by their module finds one that lacks them.
    name, _, path = part.partition(":")
    copy = types.ModuleType(name)
    copy.__dict__.update({key: value for key, value in vars(sys.modules[name]).items() if key != path.split(".")[0]})
    sys.modules[name] = copy
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["plain", "missing"])
def test_a_run_without_the_private_parts_gives_the_same_bits(way: str, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYFL_"))}
    # Without its parts Ray is asked for a token only if it reads that as it is loaded.
    given = {ray_internals.PLAIN: "1"} if way == "plain" else {"RAY_AUTH_MODE": "token"}
    for name in ("ray", "inline"):
        (tmp_path / name).mkdir()
    program = RUN.replace("{before}", WITHOUT if way == "missing" else "")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ray")],
        env=clean | given | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    found, *rounds = done.stdout.splitlines()
    # No part is found; no fork server runs in a plain Ray; each Ray asks for a token.
    assert found == "0" and rounds == [f"{way == 'missing'} True"] * 4
    setup = prepare(experiment("scaffold"))
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "inline"))
    assert_same_run(tmp_path / "ray", tmp_path / "inline")


INLINE = """
import importlib.metadata, sys

asked_for = []


class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            asked_for.append(name)
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, NoRay())
version = importlib.metadata.version


def asked(name):
    if name == "ray":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


importlib.metadata.version = asked
from jobs.cli import main
code = main.main(["run", "demo", "rounds=1", "--inline", "output.report=false", "--output", sys.argv[1]],
                 standalone_mode=False)
print(asked_for, "actors.session" in sys.modules)
"""


def test_an_inline_run_needs_no_ray_and_looks_for_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INLINE, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] False"
