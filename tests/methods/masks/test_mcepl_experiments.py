"""The experiment files of MCE-PL: the paper's list of shares, and two rounds on made-up images of CIFAR-10's shape."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.data.datasets import Dataset, Examples
from rayfl.data.sources.cifar import CIFAR10
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.sweep import read_sweep
from rayfl.experiment.table import read_table
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import simulate

EXPERIMENTS = Path(__file__).resolve().parents[3] / "jobs" / "experiments"


def made_up(source: CIFAR10) -> Dataset:
    """Noise, ten images of each class to train and four to test."""
    draw = np.random.default_rng(0)

    def examples(count: int) -> Examples:
        inputs = draw.integers(0, 256, (10 * count, 3, 32, 32)).astype(np.uint8)
        return Examples(inputs, np.repeat(np.arange(10), count))

    shades = (0.5, 0.5, 0.5)
    return Dataset(
        "cifar10", train=examples(10), test=examples(4), num_classes=10, kind="image", mean=shades, std=shades
    )


@pytest.mark.parametrize("method", ["mcepl", "par_weipru"])
def test_two_rounds_in_the_shape_of_cifar10(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CIFAR10, "load", made_up)
    monkeypatch.setattr(CIFAR10, "files", lambda source: [])
    table: dict[str, Any] = read_table(EXPERIMENTS / "mcepl-cifar10.toml")
    table["clients"] = {"count": 4, "retention_ratio": table["clients"]["retention_ratio"][1:5]}
    table |= {"rounds": 2, "topology": "fully-connected"}
    if method != "mcepl":
        table["method"] = {"name": method}
    here, records = prepare(Experiment(**table)), []
    simulate(here, InlineExecutor(here), lambda record, run_state: records.append(record))
    for record in records:
        if method == "mcepl":
            assert [row.uplink_bits for row in record.clients] == [3 * 8 * 153_416] * 4
            assert record.means["comm/link_megabytes"] == pytest.approx(0.153416)
        else:
            # The weights of the AlexNet and its 202 biases, 4 bytes each; by the sparse bill the shares of 0.4 to 0.1.
            assert record.means["comm/link_megabytes"] == pytest.approx(4 * 1_227_530 / 1e6)
            assert 0.1 < record.means["comm/mean_megabytes"] / (3 * 4 * 1.22753) < 0.4
    assert 0 <= records[-1].means["own/accuracy"] <= 1


@pytest.mark.parametrize("name", ["mcepl-fmnist", "mcepl-cifar10"])
def test_the_shares_are_the_paper_s(name: str):
    experiment = Experiment(**read_table(EXPERIMENTS / f"{name}.toml"))
    shares = experiment.clients.retention_ratio
    assert isinstance(shares, tuple | list) and len(shares) == experiment.clients.count == 20
    # 15 and 5 of them; agents 2, 4, 6 and 8 as the text says elsewhere, counted from 1.
    assert [shares[agent - 1] for agent in (2, 4, 6, 8)] == [0.4, 0.2, 0.1, 0.2]
    assert [shares.count(one) for one in (0.4, 0.3, 0.2, 0.1)] == [5, 6, 4, 5]
    assert experiment.topology is not None and experiment.topology.name == "erdos-renyi"


def test_the_hypothesis_is_checked_at_three_shares():
    found = read_sweep(EXPERIMENTS / "dslth-fmnist.toml")
    assert found is not None
    names = [one.experiment.method.name for one in found]
    assert names == ["local", "ind_mask", "ind_mask", "ind_mask"]
