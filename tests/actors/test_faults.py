"""What dies changes nothing: actors, nodes, coordinator and driver, over real processes of a Ray of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.bench.chaos import METHODS, bits_different, experiment
from jobs.single import run

PROGRAM = """
from rayfl.determinism.process import prepare_process
prepare_process()
import sys
from jobs.bench.chaos import bench
sys.exit(bench(["fedpse"], kills=3, seed=5, rounds=12))
"""


@pytest.mark.ray
def test_no_bit_differs_after_kills_of_every_kind() -> None:
    # A process of its own: this one is connected to the tests' cluster.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"fedpse\s+│ (\w[\w ]+?)\s+│ (\d+)\s+│ (\d+)\s+│ \S+\s+│ (\d+)", done.stdout)
    assert [row[0] for row in rows] == ["actors killed", "nodes lost", "coordinator killed", "stopped and resumed"]
    assert all(int(kills) >= 1 and different == "0" for _, kills, _, different in rows)
    assert int(rows[0][1]) >= 3 and int(rows[2][2]) > 0


def test_a_bit_that_differs_is_counted(tmp_path: Path) -> None:
    seeds = []
    for seed in (1, 1, 2):
        chosen = experiment("fedavg", tmp_path, rounds=1)
        runtime = chosen.runtime.model_copy(update={"executor": "inline"})
        seeds.append(run(chosen.model_copy(update={"seed": seed, "runtime": runtime})))
    assert bits_different(seeds[0], seeds[1]) == 0
    assert bits_different(seeds[0], seeds[2]) > 1000
    model = seeds[1] / "models" / "global.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 5
    model.write_bytes(content)
    assert bits_different(seeds[0], seeds[1]) == 2


@pytest.mark.parametrize("method", METHODS)
def test_the_experiment_of_the_chaos_is_one(method: str, tmp_path: Path) -> None:
    assert experiment(method, tmp_path, rounds=3).method.name == method
