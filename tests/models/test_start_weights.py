"""model.start: the weights of a file are those of round 0, are kept with the run, and must fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rayfl.experiment.experiment import read
from rayfl.experiment.prepare import prepare
from rayfl.models import start_weights
from rayfl.run_directory.saved_models import load_model
from tests.actors.toys import assert_same_run
from tests.jobs.commands import rayfl
from tests.refusals import refused

FILE = """
rounds = 2
data = "digits"
partition = "iid"
model = {name = "mlp", hidden = [8], start = "given/weights.safetensors"}
clients = {count = 4}
method = {name = "fedavg", lr = 0.1}
checkpoint = {every = 1}
output = {report = false}
"""
SHAPES = {"1.weight": (8, 64), "1.bias": (8,), "3.weight": (10, 8), "3.bias": (10,)}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def home(tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment and its weights in a folder of their own, which is not the current one."""
    folder = tmp_path / "mine"
    (folder / "given").mkdir(parents=True)
    (folder / "started.toml").write_text(FILE)
    save_file(weights, folder / "given" / "weights.safetensors")
    monkeypatch.chdir(tmp_path)
    return folder


def run(*arguments: object) -> None:
    result = rayfl(*arguments, "--inline")
    assert result.exit_code == 0, result.output


def test_round_0_begins_with_the_weights_of_the_file(home: Path, weights: dict[str, torch.Tensor]) -> None:
    initial = prepare(read(home / "started.toml")).initial
    assert list(initial) == list(SHAPES)
    for name, tensor in weights.items():
        assert torch.equal(initial[name], tensor)
    run("run", home / "started.toml", "method.lr=1e-12", "--output", "still")
    for name, tensor in load_model(Path("still"), "global").items():
        torch.testing.assert_close(tensor, weights[name])


def test_the_model_of_one_run_starts_another(home: Path) -> None:
    run("run", home / "started.toml", "--output", "first")
    model = {name: tensor.numpy() for name, tensor in load_model(Path("first"), "global").items()}
    second = prepare(read(home / "started.toml", ["model.start=first/models/global.safetensors"]))
    assert all(np.array_equal(second.initial_arrays[name], tensor) for name, tensor in model.items())


def test_a_run_keeps_the_weights_that_it_started_from(home: Path, weights: dict[str, torch.Tensor]) -> None:
    run("run", home / "started.toml", "rounds=4", "--output", "long")
    run("run", home / "started.toml", "--output", "short")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, home / "given" / "weights.safetensors")
    run("resume", "short", "--rounds", 4)
    assert_same_run(Path("long"), Path("short"))
    (home / "given" / "weights.safetensors").unlink()
    run("run", "long/experiment.toml", "--output", "again")
    assert_same_run(Path("long"), Path("again"))
    result = rayfl("run", home / "started.toml", "--output", "gone")
    refused(result, names=["weights.safetensors", "model.start="])


def test_weights_of_another_precision_become_those_of_the_model(
    home: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "half.safetensors"
    save_file({name: tensor.half() for name, tensor in weights.items()}, file)
    initial = prepare(read(home / "started.toml", [f"model.start={file}"])).initial
    assert all(torch.equal(initial[name], tensor.half().float()) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda w: {}, ["holds nothing"]),
        (lambda w: {k: v for k, v in w.items() if k != "3.bias"}, ["3.bias", "1.bias"]),
        (lambda w: {**w, "4.bias": w["3.bias"].clone()}, ["4.bias"]),
        (lambda w: {**w, "3.bias": torch.zeros(9)}, ["3.bias", "[9]", "[10]"]),
        (lambda w: {**w, "3.bias": torch.zeros(10, dtype=torch.long)}, ["3.bias", "int64"]),
        (lambda w: {**w, "3.bias": torch.full((10,), torch.nan)}, ["3.bias", "not finite"]),
        (lambda w: {**w, "3.bias": torch.full((10,), 1e300, dtype=torch.float64)}, ["not finite"]),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change, names: list[str], weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "w.safetensors"
    save_file(change(weights), file)
    with refused(names=[file, *names]):
        start_weights.read_weights(file, weights, "mlp")


@pytest.mark.parametrize("content", [b"", b"not one", b"\xff" * 100])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with refused(names=[file, "safetensors"]):
        start_weights.read_weights(file, {}, "mlp")


def test_a_method_with_weights_of_its_own_refuses_others(home: Path) -> None:
    settings = ["method={name = 'mcepl', weight_init = 'uniform'}", "topology=ring"]
    with refused(names=["mcepl", "remove", "model.start"]):
        prepare(read(home / "started.toml", settings))
    prepare(read(home / "started.toml", ["method=mcepl", "topology=ring"]))


class Tied(nn.Module):
    """A layer under two names, a buffer that its state_dict leaves out, and an embedding that is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = self.first
        self.head = nn.Linear(64, 10)
        self.rows = nn.Embedding(10, 64)
        self.rows.weight = self.head.weight
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(64), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(self.scale * images.flatten(1))))))


def test_the_state_dict_of_the_very_class_fits(home: Path, tmp_path: Path) -> None:
    states = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    assert {"second.weight", "rows.weight"} < states.keys() and "scale" not in states
    settings = [f"model={{name = '{__file__}:Tied', start = '{tmp_path}/w.pt'}}"]
    torch.save(states, tmp_path / "w.pt")
    setup = prepare(read(home / "started.toml", settings))
    assert {"first.weight", "first.bias", "head.bias"} < setup.initial.keys() and len(setup.initial) == 4
    assert torch.equal(setup.initial["first.weight"], states["second.weight"])
    # Of tied weights one name is enough, as safetensors writes them, and an older file may have the buffer.
    less = {name: tensor for name, tensor in states.items() if name not in ("first.weight", "rows.weight")}
    torch.save({**less, "scale": torch.full((64,), 2.0)}, tmp_path / "w.pt")
    setup = prepare(read(home / "started.toml", settings))
    assert torch.equal(setup.initial["first.weight"], states["second.weight"])
    assert setup.method.task.constants["scale"].tolist() == [2.0] * 64
    torch.save({**states, "second.weight": torch.zeros(64, 64)}, tmp_path / "w.pt")
    with refused(names=["first.weight", "second.weight", "two different"]):
        prepare(read(home / "started.toml", settings))
