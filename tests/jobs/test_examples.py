"""The examples run by the command that the documentation gives, and FedNova is the paper's."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.choices.kinds import find
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method
from rayfl.report.results import RunResults, load
from rayfl.rounds.setup import Setup
from rayfl.run_directory.record import read_run
from rayfl.testing.executors import play
from tests.jobs.commands import rayfl
from tests.refusals import refused

EXAMPLES = Path(__file__).resolve().parents[2] / "jobs" / "examples"
FEDNOVA = f"{EXAMPLES}/my_methods.py:FedNova"


@pytest.mark.parametrize(("name", "accuracy"), [("fednova", 0.8), ("model", 0.8), ("data", 0.9), ("metric", 0.8)])
def test_an_example_runs_and_learns(name: str, accuracy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", f"examples/{name}.toml", "--inline", "--output", "run")
    assert result.exit_code == 0, result.output
    run = read_run(Path("run"))
    pooled = [row["value"] for row in run.metrics.to_pylist() if row["name"] == "pooled/accuracy"]
    assert run.finished and pooled[-1] >= accuracy


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


def softmax_gradient(inputs: np.ndarray, labels: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> tuple:
    """Of the mean cross-entropy of a linear layer: d weight [classes, dim] and d bias [classes]."""
    logits = inputs @ weight.T + bias
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return shares.T @ inputs / len(labels), shares.mean(axis=0)


def three_clients(lr: float, momentum: float, **method: object) -> Setup:
    """Three clients that do 4, 4 and 2 full-batch steps: their speeds over the median are 2, 1 and 1/2."""
    tables: dict[str, Any] = {
        "rounds": 2,
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 0.5},
        "model": "logistic",
        "clients": {"count": 3, "examples_per_s": [100.0, 50.0, 25.0], "work": "capacity"},
        "method": {"name": FEDNOVA, "lr": lr, "momentum": momentum, "steps": 4, "batch_size": 0, **method},
    }
    return prepare(Experiment(**tables))


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fednova_by_hand(momentum: float, weighting: str):
    lr, steps = 0.3, (4, 4, 2)
    here = three_clients(lr, momentum, weighting=weighting)
    names = list(here.initial)
    x = [here.initial[name].double().numpy() for name in names]
    sizes = here.population.num_examples
    p = sizes / sizes.sum() if weighting == "samples" else np.full(3, 1 / 3)
    records, run_states = play(here)
    for record, run_state in zip(records, run_states, strict=True):
        directions, norms = [], []
        for client, tau in enumerate(steps):
            rows = here.partition.train[client]
            inputs = here.dataset.prepare(here.dataset.train.inputs[rows]).numpy().reshape(len(rows), -1).astype(float)
            labels = here.dataset.train.labels[rows]
            now, velocity, weights_of_gradients = [part.copy() for part in x], [0.0, 0.0], np.zeros(tau)
            for step in range(tau):
                gradient = softmax_gradient(inputs, labels, *now)
                velocity = [momentum * v + g for v, g in zip(velocity, gradient, strict=True)]
                now = [part - lr * v for part, v in zip(now, velocity, strict=True)]
                # The gradient of step k is in every later velocity, less and less: a_i, counted and not in closed form.
                weights_of_gradients[: step + 1] += momentum ** np.arange(step, -1, -1)
            norms.append(weights_of_gradients.sum())
            directions.append([(a - b) / norms[-1] for a, b in zip(x, now, strict=True)])
        effective = float(p @ norms)
        x = [part - effective * sum(p[i] * directions[i][k] for i in range(3)) for k, part in enumerate(x)]
        found = next(one.value for one in record.metrics if one.name == "fednova/effective_steps")
        assert found == pytest.approx(effective, rel=1e-6)
        for name, part in zip(names, x, strict=True):
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), part, rtol=0, atol=2e-6)


def test_without_differences_fednova_is_fedavg():
    def final(name: str) -> np.ndarray:
        tables: dict[str, Any] = {
            "rounds": 2,
            "data": "digits",
            "partition": "iid",
            "model": "logistic",
            "clients": {"count": 3},
            "method": {"name": name, "lr": 0.3, "steps": 3},
        }
        params = play(prepare(Experiment(**tables)))[1][-1].server["params"]
        return np.concatenate([params[name].numpy().ravel() for name in sorted(params)])

    np.testing.assert_allclose(final(FEDNOVA), final("fedavg"), rtol=0, atol=1e-6)


def test_fednova_refuses_an_optimizer_that_it_does_not_know():
    with refused(names=["optimizer='adam'", "optimizer='sgd'"]):
        find(Method, FEDNOVA).Hyper(optimizer="adam")
