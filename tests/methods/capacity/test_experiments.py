"""Whole experiments with sub-models: what is refused, what is recorded, saved and remembered."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rayfl
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds import engines
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing import contracts
from rayfl.testing.executors import contents
from tests.methods.capacity.reference import places, setup
from tests.methods.reference import played
from tests.refusals import refused

METHODS = ("heterofl", "feddropout", "fedrolex", "fjord")
# Any: tables of an experiment.
TABLES: dict[str, Any] = {
    "rounds": 2,
    "data": "digits",
    "partition": "iid",
    "model": {"name": "mlp", "hidden": [12, 6]},
    "clients": {"count": 6, "retention_ratio": [1.0, 0.6, 0.2]},
    "runtime": {"executor": "inline"},
    "output": {"report": False},
}


def experiment(name: str = "heterofl", method: dict[str, Any] | None = None, **tables: Any) -> dict[str, Any]:
    return {**TABLES, "method": {"name": name, "lr": 0.1, **(method or {})}, **tables}


class Residual(nn.Module):
    """Blocks with group and layer norms, and a residual sum, on images [1, 8, 8]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8)
        self.block = nn.Sequential(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 8, 1))
        # A layer norm of two units would magnify rounding.
        self.flat, self.last, self.head = nn.Linear(8 * 9, 40), nn.LayerNorm(40), nn.Linear(40, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images)).relu()
        x = nn.functional.max_pool2d(x + self.block(x), 2)
        return self.head(self.last(self.flat(x.flatten(1)).relu()))


class WithBatchNorm(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), nn.BatchNorm1d(12)
        self.head = nn.Linear(12, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.body(images)).relu())


class Bilinear(nn.Module):
    """A network whose last layer is none that is known."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), nn.Linear(12, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return 2 * self.head(self.body(images))


class Shuffled(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Conv2d(1, 8, 3), nn.PixelShuffle(2))
        self.head = nn.Linear(288, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.up(images).flatten(1))


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ({"downlink": {"name": "topk", "keep_ratio": 0.5}}, ["downlink", "HeteroFL"]),
        ({"uplink": "powersgd"}, ["uplink", "powersgd", "HeteroFL", "topk"]),
        ({"wrap": ["trimmed-mean"]}, ["wrap", "trimmed-mean", "HeteroFL"]),
        ({"wrap": ["elastic"], "splits": {"heldout_ratio": 0.1}}, ["elastic", "HeteroFL"]),
        ({"wrap": ["central-dp"], "method": {"weighting": "uniform"}}, ["central-dp", "fedavg"]),
        ({"evaluation": {"masks": True}}, ["evaluation.masks", "HeteroFL"]),
        ({"clients": {"count": 6, "sparse_speedup": True}}, ["clients.sparse_speedup", "HeteroFL"]),
        ({"parts": {"personal": ["5.*"]}}, ["parts.personal", "heterofl"]),
        ({"model": "logistic"}, ["HeteroFL", "mlp"]),
        ({"model": WithBatchNorm}, ["heterofl", "BatchNorm", "GroupNorm"]),
        ({"model": WithBatchNorm, "parts": {"buffers": "frozen"}}, ["HeteroFL", "norm.running_mean", "GroupNorm"]),
        ({"model": Shuffled}, ["'up.1'", "PixelShuffle"]),
        ({"clients": {"count": 6, "retention_ratio": 0.5}, "method": {"dynamic_ratios": [1.0]}}, ["retention_ratio"]),
        ({"model": Bilinear, "method": {"masked_loss": True}}, ["method.masked_loss", "linear layer"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_is_refused(tables: dict[str, Any], names: list[str]):
    with refused(names=names):
        prepare(Experiment(**experiment(**tables)))


def test_a_width_that_no_step_draws_is_refused():
    with refused(names=["clients.retention_ratio", 0.3, "method.widths"]):
        prepare(Experiment(**experiment("fjord", clients={"count": 6, "retention_ratio": 0.3})))


@pytest.mark.parametrize("method", METHODS)
def test_somebodys_own_model_trains_in_the_loop_and_in_stacks_alike(method: str):
    def made(engine: str, **tables: Any):
        runtime = {"engine": engine, "stack_width": None if engine == "loop" else 6}
        tables = experiment(method, model=Residual, method={"batch_size": 60}, runtime=runtime, **tables)
        return prepare(Experiment(**tables))

    contracts.loop_and_vmap_agree(made("loop"), made("vmap"))
    contracts.several_workers_give_the_bits_of_one(made("loop"))


def test_stacks_of_several_widths_are_not_each_as_wide_as_a_stack_of_one(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    stack = engines.stack

    def counted(carries: Any, width: int, device: torch.device) -> Any:
        rows.append(width)
        return stack(carries, width, device)

    monkeypatch.setattr(engines, "stack", counted)
    for ratios, wanted in (([1.0, 0.6, 0.2], {8: [2, 2, 2], 4: [2, 1, 1, 2]}), ([0.6], {8: [8], 4: [4, 4]})):
        for width, of_stacks in wanted.items():
            rows.clear()
            runtime = {"engine": "vmap", "stack_width": width, "executor": "inline"}
            clients = {"count": 6, "retention_ratio": ratios}
            setup = prepare(Experiment(**experiment("fedrolex", clients=clients, runtime=runtime, rounds=1)))
            contracts.several_workers_give_the_bits_of_one(setup)
            assert set(rows) <= {*of_stacks}


def test_narrow_models_are_evaluated_saved_and_read_again(tmp_path: Path):
    hyper = {"lr": 0.1, "evaluated_widths": [0.2, 1.0]}
    # Any: rayfl looks its functions up when they are asked for.
    run: Any = rayfl.run(directory=tmp_path / "run", progress=False, **experiment(method=hyper))  # type: ignore
    last = run.metrics[run.metrics["round"] == 1].set_index("name")["value"]
    assert last["pooled/accuracy_at_width_1"] == last["pooled/accuracy"]
    assert 0 <= last["pooled/accuracy_at_width_0.2"] <= 1
    for client, units in ((0, 12), (1, 8), (2, 3)):
        network = run.personal_model(client).network
        assert network[1].weight.shape == (units, 64)
        assert torch.equal(network[1].weight, run.model().network[1].weight[:units])


def test_an_uplinks_memory_lies_in_full_shapes_and_changes_where_a_client_trained():
    uplink = ErrorFeedback(inner=TopK(keep_ratio=0.2))
    made = setup("fedrolex", {"lr": 0.3, "batch_size": 4}, ratios=[0.5], uplink=uplink)
    method: Any = made.method
    before: dict[int, dict[str, np.ndarray]] = {}
    changed = 0
    for round, (record, run_state) in enumerate(played(made)):
        now = contents(InlineExecutor(made), run_state)
        units = tuple(method.window(0.5, round, made.seed))
        for row in record.clients:
            place = f"state {row.client}/uplink/slice/"
            memory = {key.removeprefix(place): value for key, value in now.items() if key.startswith(place)}
            old = before.get(row.client) or {name: np.zeros_like(value) for name, value in memory.items()}
            for name, at in places(units).items():
                outside = np.ones(memory[name].shape, bool)
                outside[at] = False
                assert np.array_equal(memory[name][outside], old[name][outside])
                changed += int((memory[name][at] != old[name][at]).sum())
            before[row.client] = memory
    assert changed > 50
