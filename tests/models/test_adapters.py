"""LoRA on a frozen model: a tiny transformer whose weights are made from a seed, on the next token."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rayfl
from rayfl.models.adapters import Adapters
from tests.refusals import refused

EXAMPLES = Path(__file__).resolve().parents[2] / "jobs" / "examples"
LORA = {"layers": ["layers.*.query", "layers.*.value"], "rank": 4, "trained": ["head.*"]}
NUM_TRAINED = 4 * 2 * 4 * 16 + 16 * 8 + 8
"""Four layers of 16 x 16 with rank 4, and a head of 8 tokens."""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def run(directory: Path, **tables: Any) -> Any:
    settings = {
        "data": {"name": f"{EXAMPLES}/my_transformer.py:Patterns"},
        "partition": "natural",
        "clients": {"count": 4},
        "task": "next-token",
        "model": f"{EXAMPLES}/my_transformer.py:Transformer",
        "method": {"name": "fedavg", "lr": 0.1, "batch_size": 8},
        "adapters": LORA,
        "rounds": 2,
        "runtime": {"executor": "inline"},
        "output": {"report": False},
        "progress": False,
    }
    return rayfl.run(directory=directory, **{**settings, **tables})


def test_an_adapter_is_at_the_named_layers_alone():
    module = nn.ModuleDict({"query": nn.Linear(2, 2), "inner": nn.ModuleDict({"query": nn.Linear(2, 2)})})
    adapted = Adapters(layers=("query",), rank=1).adapted(lambda: module)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and all(name.startswith("query.") for name in trained)


def test_the_first_adapted_model_is_the_frozen_one():
    torch.manual_seed(3)
    plain = network()
    state, inputs = {name: tensor.clone() for name, tensor in plain.state_dict().items()}, torch.randn(5, 4)
    adapted = Adapters(layers=("1",), rank=2, alpha=6.0).adapted(lambda: plain)
    frozen = network()
    frozen.load_state_dict(state)
    assert torch.equal(adapted(inputs), frozen(inputs))
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name: list(one.shape) for name, one in trained.items()} == {
        "1.lora_A.default.weight": [2, 3],
        "1.lora_B.default.weight": [3, 2],
    }
    a, b = trained.values()
    nn.init.ones_(b)
    hidden = frozen[0](inputs)
    expected = frozen[2](frozen[1](hidden) + 3.0 * hidden @ a.T @ b.T)
    torch.testing.assert_close(adapted(inputs), expected)


def test_only_adapters_travel_and_the_backbone_stays(tmp_path: Path):
    found = run(tmp_path / "run")
    assert set(found.clients["downlink_bits"]) == {32 * NUM_TRAINED}
    one, two = (
        load_file(path / "models" / "global.safetensors")
        for path in (found.directory, run(tmp_path / "next", rounds=3).directory)
    )
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved == {name for name in one if "lora" in name or name.startswith("head")}
    inputs = torch.randint(0, 8, (3, 12))
    assert found.model()(inputs).shape == (3, 12, 8)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"method": {"name": "fedpse", "lr": 0.1, "keep_ratio": 0.5}},
        {"uplink": {"name": "topk", "keep_ratio": 0.2}},
        {"parts": {"personal": ["*lora_B*"]}},
    ],
    ids=["fedavg", "fedpse", "topk", "personal"],
)
def test_methods_and_compressors_learn_on_adapters(tables: Any, tmp_path: Path):
    found = run(tmp_path / "run", rounds=4, **tables)
    losses = found.frame["own/loss"]
    assert losses.iloc[-1] < 0.99 * losses.iloc[0]
    stacked = run(tmp_path / "stacked", rounds=1, runtime={"executor": "inline", "engine": "vmap"}, **tables)
    assert stacked.frame["train/loss"].iloc[0] == pytest.approx(found.frame["train/loss"].iloc[0], rel=1e-4)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_backbone_starts_from_a_file_by_the_names_of_its_layers(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shapes = load_file(run(tmp_path / "first").directory / "models/global.safetensors")
    file = {name.replace(".base_layer.", "."): tensor + 0.01 for name, tensor in shapes.items() if "lora" not in name}
    del file["head.weight"], file["head.bias"]
    file["pooler.weight"] = torch.ones(2)
    path = tmp_path / "backbone"
    save_file(file, path) if form == "safetensors" else torch.save({"state_dict": file}, path)
    model = {"name": f"{EXAMPLES}/my_transformer.py:Transformer", "start": str(path)}
    with caplog.at_level(logging.INFO, "rayfl"):
        found = load_file(run(tmp_path / "run", model=model).directory / "models/global.safetensors")
    assert torch.equal(found["layers.0.query.base_layer.weight"], file["layers.0.query.weight"])
    assert torch.equal(found["tokens.weight"], file["tokens.weight"])
    assert "pooler.weight is left over" in caplog.text and "head.bias starts at random" in caplog.text
    del file["tokens.weight"]
    save_file(file, path)
    with refused(names=["backbone", "'tokens.weight'"]):
        run(tmp_path / "other", model=model)


@pytest.mark.parametrize(
    ("adapters", "names"),
    [
        ({"layers": ["layers.*.qery"]}, ["adapters.layers", "'layers.*.qery'", "did you mean"]),
        ({"layers": ["layers.0.query"], "trained": ["hed.*"]}, ["adapters.trained", "'hed.*'"]),
        ({"layers": []}, ["adapters.layers"]),
        ({"layers": ["head"], "rank": 0}, ["adapters.rank=0"]),
    ],
)
def test_adapters_of_no_layer_are_refused(adapters: Any, names: list[str], tmp_path: Path):
    with refused(names=names):
        run(tmp_path / "run", adapters=adapters)
