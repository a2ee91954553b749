"""What dies changes nothing: runs under attack, whose processes belong to a Ray of their own."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import attack, chaos
from benchmarks.victims import processes
from jobs.single import run
from rayfl.methods.base import PeerHalf
from tests.benchmarks.commands import benchmark
from tests.refusals import refused

PROGRAM = """
from rayfl.determinism.process import prepare_process
prepare_process()
import json
from dataclasses import replace
from benchmarks import chaos
from benchmarks.attack import Attack
from benchmarks.chaos import experiment, play_all

undisturbed = chaos.undisturbed

def quick(file, directory):
    calm = undisturbed(file, directory, "runtime.executor=inline")
    return replace(calm, seconds=calm.rounds_s)

# One process plays the undisturbed run: it has the same bits and starts no Ray. Strikes are tried from the beginning,
# and again after a moment as long as they find no victim.
chaos.undisturbed = quick
attacks = [Attack("buffered fedpse", "mixed", ("actors", "stopped actor", "coordinator", "driver"), "3", pause_s=3.0)]
# A run may still end before all strikes are done.
for _ in range(2):
    (row,) = play_all({"buffered fedpse": experiment("buffered fedpse", rounds=40)}, attacks)
    if row.kills == 5 or row.runs_lost or row.bits_different:
        break
print(json.dumps(row._asdict()))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_strikes_of_many_kinds_cost_no_run_and_no_bit() -> None:
    # A process of its own, whose main thread starts Rays. Other tests take Ray's servers, the disk and nodes away.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout)
    assert row["runs_lost"] == row["bits_different"] == 0, done.stderr
    # Several actors at once are the two that there are.
    assert row["kills"] == 5


def test_plans_have_every_kind_for_every_method_by_turns_and_kills_enough() -> None:
    plans = [chaos.plan(chaos.METHODS, 100, seed) for seed in (1, 2, 3)]
    both = [{(each.method, each.name) for each in plan} for plan in plans]
    kinds = {*chaos.ALWAYS, *chaos.BY_TURNS[0], *chaos.BY_TURNS[1]}
    assert both[0] | both[1] == {(method, kind) for method in chaos.METHODS for kind in kinds}
    assert {kind for _, kind in both[0]} == kinds and both[0] == both[2]
    assert {strike for plan in plans for each in plan for strike in each.strikes} == set(attack.STRIKES)
    for plan in plans:
        # Several actors at once are at least two kills.
        assert sum(1 + (strike == "actors") for each in plan for strike in each.strikes) >= 100
        assert len({each.seed for each in plan}) == len(plan)
    assert plans[0] == chaos.plan(chaos.METHODS, 100, seed=1) != plans[2]


def test_a_driver_sees_one_ending() -> None:
    assert attack.of_one_life(["driver", "actor", "gcs", "coordinator"]) == ["actor", "coordinator", "driver"]
    assert attack.of_one_life(["actor"]) == ["actor"]
    assert set(attack.ENDINGS) < set(attack.STRIKES)


@pytest.mark.parametrize(
    ("code", "errors", "done", "lost"),
    [
        (-9, "", ["actor", "driver"], False),
        (-9, "", ["driver", "actor"], True),
        (1, "rayfl: the run failed: Ray is gone; go on with: rayfl resume {run}", ["gcs"], False),
        (1, "rayfl: the run failed: Ray is gone; go on with: rayfl resume {run}", ["actor"], True),
        (1, "rayfl: the run failed: Ray is gone", ["gcs"], True),
        (1, "[E 05:11] core_worker.cc\nrayfl: the run failed; go on with: rayfl resume {run}", ["gcs"], True),
        (2, "rayfl: a mistake", ["full disk"], True),
        (0, "", ["actor"], True),
        (1, "rayfl: the run failed: Ray did not start; go on with: rayfl resume {run}", [], False),
        (1, "rayfl: the coordinator died 10 times; go on with: rayfl resume {run}", ["actor"] * 10, False),
        (1, "rayfl: the coordinator died 10 times", ["actor"] * 10, True),
    ],
)
def test_a_run_that_ends_otherwise_is_lost(code: int, errors: str, done: list[str], lost: bool, tmp_path: Path) -> None:
    # The run directory is that of an unfinished run: exit code 0 is wrong too.
    for name in ("experiment.json", "platform.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    # Any: a driver that has ended, without a process.
    driver: Any = SimpleNamespace(
        process=SimpleNamespace(returncode=code), errors=errors.format(run=tmp_path), output=""
    )
    assert bool(attack.fault(driver, tmp_path, done, len(done), unstruck=2)) == lost
    assert done or attack.fault(driver, tmp_path, done, 0, unstruck=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fedavgg"], "'fedavg'"),
        (["--kills", "0"], "--kills 0"),
        (["--json", "."], ". is a directory"),
    ],
)
def test_what_cannot_be_struck_is_refused(arguments: list[str], words: str) -> None:
    refused(benchmark("chaos", *arguments), names=[words])


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_victim_is_struck_while_it_lives(child: "subprocess.Popen[bytes]") -> None:
    (victim,) = processes([child.pid])
    assert victim.kind == "" and victim.alive and victim.limit_files(10)
    assert victim.strike(signal.SIGSTOP) and victim.alive
    assert victim.strike(signal.SIGKILL)
    child.wait()
    assert not victim.alive and not victim.strike(signal.SIGKILL) and not victim.limit_files(10)
    assert processes([child.pid]) == []


def test_a_bit_that_differs_is_counted(tmp_path: Path) -> None:
    seeds = []
    for seed in (1, 1, 2):
        chosen = chaos.experiment("scaffold", rounds=1)
        runtime = chosen.runtime.model_copy(update={"executor": "inline"})
        seeds.append(run(chosen.model_copy(update={"seed": seed, "runtime": runtime}), tmp_path / f"{len(seeds)}"))
    assert chaos.bits_different(seeds[0], seeds[1]) == 0
    assert chaos.bits_different(seeds[0], seeds[2]) > 1000
    for number, file in enumerate(("models/global.safetensors", "checkpoints/00000001/states-0000.safetensors")):
        path = seeds[1] / file
        content = bytearray(path.read_bytes())
        content[-1] ^= 5
        path.write_bytes(content)
        assert chaos.bits_different(seeds[0], seeds[1]) == 2 * (number + 1)


@pytest.mark.parametrize("method", [*chaos.METHODS, "dpsgd"])
def test_the_experiment_of_the_chaos_is_one(method: str) -> None:
    chosen = chaos.experiment(method)
    schedule, name = chaos.scheduled(method)
    assert (chosen.method.name, chosen.schedule.name) == (name, schedule)
    assert chosen.uplink.name == ("feedback" if name == "fedavg" else "dense")
    assert chosen.clients.count == (10 if issubclass(chosen.method.kind, PeerHalf) else 20)
