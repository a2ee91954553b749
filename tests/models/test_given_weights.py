"""model.start: the weights of a file are those of round 0, are kept with the run, and must fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rayfl.errors import RayflError
from rayfl.experiment.experiment import read
from rayfl.experiment.prepare import prepare
from rayfl.models import given_weights
from rayfl.run_directory.record import load_model
from tests.actors.toys import assert_same_run
from tests.jobs.commands import rayfl, refused

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
    refused(
        rayfl("run", home / "started.toml", "--output", "gone"), "weights.safetensors cannot be read", "model.start="
    )


def test_weights_of_another_precision_become_those_of_the_model(
    home: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "half.safetensors"
    save_file({name: tensor.half() for name, tensor in weights.items()}, file)
    initial = prepare(read(home / "started.toml", [f"model.start={file}"])).initial
    assert all(torch.equal(initial[name], tensor.half().float()) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {}, "it holds nothing"),
        (lambda w: {k: v for k, v in w.items() if k != "3.bias"}, "it has no '3.bias' (did you mean '1.bias'?)"),
        (lambda w: {**w, "4.bias": w["3.bias"].clone()}, "the model has no '4.bias'"),
        (lambda w: {**w, "3.bias": torch.zeros(9)}, "its '3.bias' has the shape [9], and the model's has [10]"),
        (lambda w: {**w, "3.bias": torch.zeros(10, dtype=torch.long)}, "its '3.bias' holds int64"),
        (lambda w: {**w, "3.bias": torch.full((10,), torch.nan)}, "its '3.bias' holds a number that is not finite"),
        (lambda w: {**w, "3.bias": torch.full((10,), 1e300, dtype=torch.float64)}, "that is not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change, words: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "w.safetensors"
    save_file(change(weights), file)
    with pytest.raises(RayflError) as error:
        given_weights.read(file, weights, "mlp")
    assert str(file) in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not one", b"\xff" * 100])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(RayflError, match="is no safetensors file of weights"):
        given_weights.read(file, {}, "mlp")


def test_a_method_with_weights_of_its_own_refuses_others(home: Path) -> None:
    settings = ["method={name = 'mcepl', weight_init = 'uniform'}", "topology=ring"]
    with pytest.raises(RayflError, match=r"^method 'mcepl' draws weights of its own here; remove model.start$"):
        prepare(read(home / "started.toml", settings))
    prepare(read(home / "started.toml", ["method=mcepl", "topology=ring"]))
