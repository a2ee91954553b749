"""The examples run by the command that the documentation gives, and FullLength is as its docstring says."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.report.results import RunResults, load
from rayfl.run_directory.record import read_run
from rayfl.testing.executors import play
from tests.jobs.commands import rayfl
from tests.refusals import refused

EXAMPLES = Path(__file__).resolve().parents[2] / "jobs" / "examples"
FULL_LENGTH = f"{EXAMPLES}/my_methods.py:FullLength"


@pytest.mark.parametrize(("name", "accuracy"), [("own_method", 0.8), ("model", 0.8), ("data", 0.9), ("metric", 0.8)])
def test_an_example_runs_and_learns(name: str, accuracy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", f"examples/{name}.toml", "--inline", "--output", "run")
    assert result.exit_code == 0, result.output
    run = read_run(Path("run"))
    pooled = [row["value"] for row in run.metrics.to_pylist() if row["name"] == "pooled/accuracy"]
    assert run.finished and pooled[-1] >= accuracy


def test_the_example_of_peers_on_their_own_clocks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", "examples/cautious_peers.toml", "--inline", "--output", "run")
    assert result.exit_code == 0, result.output
    values = [row["value"] for row in read_run(Path("run")).metrics.to_pylist() if row["name"] == "own/accuracy"]
    assert values[-1] >= 0.8


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg_fedavg", "fedbabu"])
def test_an_example_of_parts_runs_and_its_personal_models_learn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", f"examples/{name}.toml", "--inline", "--output", "run", "rounds=4", "output.report=false")
    assert result.exit_code == 0, result.output
    run = read_run(Path("run"))
    found = {row["name"]: row["value"] for row in run.metrics.to_pylist() if row["client"] is None}
    assert run.finished and found["own/accuracy"] >= 0.8
    assert ("pooled/accuracy" in found) == (name == "fedbabu")


@pytest.mark.slow
def test_fedbn_on_a_strangers_resnet_learns_and_sends_no_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", "examples/fedbn.toml", "--inline", "--output", "run")
    assert result.exit_code == 0, result.output
    run = read_run(Path("run"))
    means = [row["value"] for row in run.metrics.to_pylist() if row["name"] == "own/accuracy" and row["client"] is None]
    assert run.finished and means[-1] >= 0.7
    # A stem of 1 * 12 filters and two blocks of 2 * 12 * 12 of them, 3x3 each, and a head of 12 * 10 + 10.
    shared = 9 * (12 + 2 * 2 * 12 * 12) + 130
    assert {row["downlink_bits"] for row in run.clients.to_pylist()} == {32 * shared}
    results = load(Path("run"))
    assert isinstance(results, RunResults)
    pixels = np.zeros((2, 1, 8, 8), np.uint8)
    with refused(names=["client=NUMBER", "results.model()"]):
        results.predict(pixels)
    assert results.predict(pixels, client=4).shape == (2,)


def test_the_example_of_a_task_learns_the_quantile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nine tenths of the levels lie below the outputs. rayfl's contract runs over the task too."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", "examples/task.toml", "--inline", "--output", "run")
    assert result.exit_code == 0, result.output
    results = load(Path("run"))
    assert isinstance(results, RunResults)
    dataset = prepare(read(Path("examples/task.toml"))).dataset
    with refused(names=["classes", "results.model()"]):
        results.predict(dataset.test.inputs)
    with torch.no_grad():
        outputs = results.model()(torch.from_numpy(dataset.test.inputs))
    assert (dataset.test.labels < outputs.numpy()).mean() == pytest.approx(0.9, abs=0.05)


def test_lora_on_a_strangers_transformer_sends_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", "examples/lora.toml", "--inline", "--output", "run")
    assert result.exit_code == 0, result.output
    # The attention of two layers, 16 x 48 each, with rank 4, and a head of 8 tokens.
    assert {row["downlink_bits"] for row in read_run(Path("run")).clients.to_pylist()} == {
        32 * (2 * 4 * (16 + 48) + 16 * 8)
    }


def test_lora_on_a_vision_transformer_starts_from_its_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    for name in ("backbone", "lora_vit"):
        options = ["rounds=2", "model.width=16", "model.depth=1", "output.report=false"]
        result = rayfl("run", f"{name}.toml", "--inline", "--output", name, *options)
        assert result.exit_code == 0, result.output
    before, after = (load_file(f"{name}/models/global.safetensors") for name in ("backbone", "lora_vit"))
    frozen = {name: tensor for name, tensor in before.items() if not name.startswith("head.")}
    there = {name.replace(".base_layer.", "."): tensor for name, tensor in after.items()}
    assert all(torch.equal(there[name], tensor) for name, tensor in frozen.items())
    # Queries and values of one block, 16 x 16, with rank 8, and a head of 10 classes.
    bits = 32 * (2 * 8 * (16 + 16) + 17 * 10)
    assert {row["downlink_bits"] for row in read_run(Path("lora_vit")).clients.to_pylist()} == {bits}


def softmax_gradient(inputs: np.ndarray, labels: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> tuple:
    """Of the mean cross-entropy of a linear layer: d weight [classes, dim] and d bias [classes]."""
    logits = inputs @ weight.T + bias
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return shares.T @ inputs / len(labels), shares.mean(axis=0)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_full_length_by_hand(weighting: str):
    lr = 0.3
    tables: dict[str, Any] = {
        "rounds": 3,
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 0.1},
        "model": "logistic",
        "clients": {"count": 6},
        "method": {
            "name": FULL_LENGTH, "lr": lr, "steps": 2, "batch_size": 0, "weighting": weighting
        },
    }  # fmt: skip
    here = prepare(Experiment(**tables))
    names = list(here.initial)
    x = [here.initial[name].double().numpy() for name in names]
    sizes = here.population.num_examples
    p = sizes / sizes.sum() if weighting == "samples" else np.full(6, 1 / 6)
    records, run_states = play(here)
    for record, run_state in zip(records, run_states, strict=True):
        deltas, squares = [], np.zeros(6)
        for client in range(6):
            rows = here.partition.train[client]
            inputs = here.dataset.prepare(here.dataset.train.inputs[rows]).numpy().reshape(len(rows), -1).astype(float)
            now = x
            for _ in range(2):
                gradient = softmax_gradient(inputs, here.dataset.train.labels[rows], *now)
                now = [part - lr * g for part, g in zip(now, gradient, strict=True)]
            deltas.append([a - b for a, b in zip(x, now, strict=True)])
            squares[client] = sum((part**2).sum() for part in deltas[-1])
        mean = [np.sum([p[i] * deltas[i][k] for i in range(6)], axis=0) for k in range(len(names))]
        server_lr = np.sqrt(p @ squares / sum((part**2).sum() for part in mean))
        assert 1 < server_lr < 3
        x = [part - server_lr * step for part, step in zip(x, mean, strict=True)]
        found = next(one.value for one in record.metrics if one.name == "full_length/server_lr")
        assert found == pytest.approx(server_lr, rel=1e-4)
        for name, part in zip(names, x, strict=True):
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), part, rtol=0, atol=1e-5)


def test_full_length_is_fedavg_where_its_steps_may_not_be_longer():
    def final(name: str, **settings: float) -> np.ndarray:
        tables: dict[str, Any] = {
            "rounds": 2,
            "data": "digits",
            "partition": "iid",
            "model": "logistic",
            "clients": {"count": 3},
            "method": {"name": name, "lr": 0.3, "steps": 3, **settings},
        }
        params = play(prepare(Experiment(**tables)))[1][-1].server["params"]
        return np.concatenate([params[name].numpy().ravel() for name in sorted(params)])

    np.testing.assert_allclose(final(FULL_LENGTH, most=1.0), final("fedavg"), rtol=0, atol=1e-6)
