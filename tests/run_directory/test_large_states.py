"""Personal models and states that are together larger than memory: they are written and read a few at a time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rayfl.report.results import RunResults
from rayfl.run_directory import saved_models
from rayfl.run_directory.record import read_run
from rayfl.run_directory.run_files import is_own_file
from rayfl.run_directory.saved_models import load_model, model_files, save_model

PROGRAM = """
import resource, sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rayfl.methods.personal.local import Local
from rayfl.population.sampling import Clients, Population
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.run_directory import checkpoint, saved_models
from rayfl.run_directory.play_run import final_models
from tests.contracts.seams import quadratic

CLIENTS, ENTRIES = 100, 1 << 20


class Elsewhere(InlineExecutor):
    '''An executor whose objects lie elsewhere: each state comes into this process when it is asked for.'''

    def get(self, ref):
        return {"params": {"w": np.full(ENTRIES, ref, np.float32)}} if isinstance(ref, int) else ref

    def put(self, state):
        if not isinstance(state, dict):
            return state
        assert state["params"]["w"].shape == (ENTRIES,)
        return int(state["params"]["w"][-1])

    def _do(self, shared, job):
        return super()._do(shared, replace(job, inputs=tuple(map(self.get, job.inputs))))


checkpoint.FILE_BYTES = saved_models.MODEL_BYTES = 8 << 20
directory = Path(sys.argv[1])
setup = replace(
    quadratic.setup(Local),
    initial_arrays={"w": np.zeros(1, np.float32)},
    population=Population(Clients(count=CLIENTS), 3, np.ones(CLIENTS)),
)
state = RunState(round=1, server={"w": torch.zeros(1)}, states={i: i for i in range(CLIENTS)}, server_memories={})
# What is loaded with the first use of each.
saved_models.save_model(directory, "first", [{"w": torch.zeros(1)}])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
elsewhere = Elsewhere(setup)
checkpoint.save(directory, state, elsewhere)
saved = peak() - before
found = final_models(setup, elsewhere, state)
[paths] = [saved_models.save_model(directory, name, parts) for name, parts in found.items()]
models = peak() - before
found = checkpoint.load(directory, elsewhere)
assert found.states == state.states and len(paths) > 10
assert (saved_models.load_model(directory, "personal", "57/")["57/w"] == 57).all()
print(saved, models, peak() - before)
"""


@pytest.mark.slow
def test_states_of_400_mb_take_80_at_once(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    saved, models, loaded = map(int, done.stdout.split())
    assert saved <= models <= loaded < 80 << 20, done.stdout


def test_a_model_in_several_files_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saved_models, "MODEL_BYTES", 100)
    parts = [{f"{client}/w": torch.full((16,), float(client))} for client in range(5)]
    paths = save_model(tmp_path, "personal", parts)
    # 64 bytes a part: a file is closed when it has more than 100.
    assert [path.name for path in paths] == [f"personal-000{number}.safetensors" for number in range(3)]
    assert all(is_own_file(f"models/{path.name}") for path in paths)
    assert model_files(tmp_path, "personal") == paths
    assert {key: tensor[0].item() for key, tensor in load_model(tmp_path, "personal").items()} == {
        f"{client}/w": client for client in range(5)
    }
    assert list(load_model(tmp_path, "personal", "4/")) == ["4/w"]
    # As few as fit in one file again: what was there before is gone.
    assert [path.name for path in save_model(tmp_path, "personal", parts[:2])] == ["personal.safetensors"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["personal.safetensors"]


def test_results_name_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saved_models, "MODEL_BYTES", 100)
    save_model(tmp_path, "personal", [{f"{client}/w": torch.zeros(64)} for client in range(3)])
    save_model(tmp_path, "global", [{"w": torch.zeros(64)}])
    (tmp_path / "experiment.json").write_text("{}")
    assert RunResults(read_run(tmp_path)).model_names == ["global", "personal"]
