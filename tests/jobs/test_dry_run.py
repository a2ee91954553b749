"""`rayfl run --dry-run`: the numbers that it prints are those of the run, and it leaves nothing behind."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from jobs import dry_run
from jobs.dry_run import DrySetup
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import simulate
from rayfl.rounds.setup import Setup
from tests.contracts.every_method import on_digits
from tests.jobs.commands import rayfl
from tests.refusals import refused

FILE = """
rounds = 5
data = "digits"
partition = {name = "dirichlet-client", alpha = 0.3}
clients = {count = 8, per_round = 3, dropout_after_training = 0.2, uplink_mbps = [1.0, 2.0]}
model = {name = "mlp", hidden = [16]}
method = {name = "fedavg", epochs = 2, batch_size = 16}
"""


def totals(setup: Setup) -> dict[str, float]:
    """The sums of the records: of bits, simulated seconds, steps and operations."""
    found: dict[str, float] = dict.fromkeys(("uplink_bits", "downlink_bits", "simulated_s", "steps", "flops"), 0.0)

    def add(record: Any, run_state: Any) -> None:
        for key in ("uplink_bits", "downlink_bits", "simulated_s"):
            found[key] += getattr(record.row, key)
        found["steps"] += sum(one.num_steps for one in record.clients)
        values = [one for one in record.metrics if one.name == "flops/training" and one.client is not None]
        found["flops"] += sum(one.value for one in values)

    simulate(setup, InlineExecutor(setup), add)
    return found


def dry(setup: Setup) -> DrySetup:
    return DrySetup(**{one.name: getattr(setup, one.name) for one in fields(Setup)})


def printed(output: str) -> dict[str, list[str]]:
    """The rows of the printed table, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("\u2502\n ").split("\u2502")] for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


FAULTS = {"per_round": 3, "dropout_after_training": 0.2, "dropout_after_download": 0.1, "uplink_mbps": [1.0, 3.0]}


@pytest.mark.parametrize(
    ("method", "options", "off"),
    [
        # Messages of fixed sizes: every bit.
        ("fedavg", {"clients": FAULTS}, None),
        ("scaffold", {"clients": FAULTS}, None),
        ("perfedavg", {"clients": {**FAULTS, "deadline_s": 1.0}}, None),
        ("dpsgd", {}, None),
        ("fedpd", {"clients": FAULTS}, None),
        ("beer", {}, None),
        # The sizes of top k's positions follow the values.
        ("fedavg", {"uplink": "topk", "downlink": "topk", "clients": FAULTS}, 0.01),
        ("dpsgd", {"uplink": "topk"}, 0.01),
        ("fedpse", {}, 0.01),
        ("fedpse", {"clients": FAULTS}, 0.01),
        # Its carry has another model after training than before.
        ("ifca", {}, 0.01),
    ],
)
def test_what_is_foreseen_is_what_a_run_records(method: str, options: dict[str, Any], off: float | None):
    setup = on_digits(method)(rounds=3, evaluation={"every": 0, "own": False, "pooled": False}, **options)
    foreseen = dry(setup)
    real, found = totals(setup), totals(foreseen)
    assert foreseen.has_fixed_sizes == (off is None)
    assert found["steps"] == real["steps"] > 0
    for key, value in found.items():
        assert value == pytest.approx(real[key], rel=off or 1e-12), key
    # One client of each shape was trained, twice.
    assert len(foreseen.engine.known) == 1


def test_the_command_prints_them_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "one.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda *given, **options: pytest.fail("Ray was started"))
    result = rayfl("run", "one.toml", "--dry-run")
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["one.toml"]
    rows, real = printed(result.output), totals(prepare(Experiment(**dry_table())))
    assert rows["steps of all clients"] == [f"{real['steps']:,.0f}", "exact"]
    assert rows["bytes up"] == [f"{real['uplink_bits'] / 8:,.0f}", "exact"]
    assert rows["bytes down"] == [f"{real['downlink_bits'] / 8:,.0f}", "exact"]
    assert rows["operations of the training"][0] == f"{real['flops']:.4g}"
    assert rows["simulated time"][0] == f"{real['simulated_s']:.1f} s"
    # All 1,797 scans and their labels lie in the object store.
    number, unit = rows["object store"][0].split()
    assert unit == "kB" and 1_797 * (64 + 8) / 1e3 < float(number) < 300


UNCOUNTED = """
from torch import nn


class Products(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.pairs = nn.Bilinear(64, 64, num_classes)

    def forward(self, images):
        return self.pairs(images.flatten(1), images.flatten(1))
"""


def test_operations_that_are_not_counted_are_not_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "products.py").write_text(UNCOUNTED)
    (tmp_path / "one.toml").write_text(FILE.replace('{name = "mlp", hidden = [16]}', '"products.py:Products"'))
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", "one.toml", "--dry-run")
    assert result.exit_code == 0, result.output
    assert printed(result.output)["operations of the training"][0] == "not counted"


def dry_table() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(FILE)


def test_a_long_run_is_extrapolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "one.toml").write_text(FILE)
    monkeypatch.setattr(dry_run, "LONGEST_S", 0.0)
    everyone = ["clients.per_round=8", "clients.dropout_after_training=0", "rounds=1000"]
    rows = printed(rayfl("run", tmp_path / "one.toml", "--dry-run", *everyone).output)
    table = {**dry_table(), "rounds": 1, "clients": {"count": 8}}
    real = totals(prepare(Experiment(**table)))
    assert rows["steps of all clients"] == [f"{1000 * real['steps']:,.0f}", "estimate from 1 round"]
    assert rows["bytes up"][0] == f"{1000 * real['uplink_bits'] / 8:,.0f}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_run_on_a_gpu_is_foreseen_on_a_machine_without_one(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    result = rayfl("run", path, "--dry-run", "rounds=1", "runtime.device=cuda", "runtime.num_gpus=1")
    assert result.exit_code == 0, result.output
    assert "trained on cpu" in printed(result.output)["real time of the rounds"][1]


@pytest.mark.parametrize("given", [["--resume"], ["--overwrite"], ["--output", "x"]])
def test_what_asks_for_a_run_is_refused(tmp_path: Path, given: list[str]):
    (tmp_path / "one.toml").write_text(FILE)
    refused(rayfl("run", tmp_path / "one.toml", "--dry-run", *given), names=["--dry-run", "--output", "--resume"])


def test_a_sweep_is_the_sum_of_its_runs(tmp_path: Path):
    (tmp_path / "one.toml").write_text(FILE)
    swept = ["sweep.seed=[1, 2, 3]", "sweep.method.epochs=[1, 3]"]
    outputs = [rayfl(command, tmp_path / "one.toml", "--dry-run", *swept).output for command in ("run", "sweep")]
    rows = [line.replace("\u2502", "|").split("|")[1:-1] for line in outputs[0].splitlines() if "\u2502" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[1] for row in cells] == ["3", "3", "6"]
    assert [row[0].endswith("2 more seeds") for row in cells] == [True, True, False]
    alone = printed(rayfl("run", tmp_path / "one.toml", "--dry-run", "method.epochs=3").output)
    assert int(cells[1][4].replace(",", "")) == 3 * int(alone["bytes up"][0].replace(",", ""))
    numbers = [[int(cell.replace(",", "")) for cell in row[2:6]] for row in cells]
    assert [a + b for a, b in zip(*numbers[:2], strict=True)] == numbers[2]
    assert [row.split("\u2502")[5] for row in outputs[1].splitlines() if "\u2502" in row] == [row[4] for row in rows]
