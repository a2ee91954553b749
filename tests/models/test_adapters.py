"""LoRA on a frozen model: a tiny transformer whose weights are made from a seed, on the next token."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import rayfl
from rayfl.models import flops
from rayfl.models.adapters import Adapters
from rayfl.models.start_weights import read_backbone
from rayfl.network import Network
from tests.bound_tasks import classification
from tests.refusals import refused

EXAMPLES = Path(__file__).resolve().parents[2] / "jobs" / "examples"
LORA = {"layers": ["*.attn.c_attn"], "rank": 4, "trained": ["*.lm_head.*"]}
NUM_TRAINED = 2 * 4 * (16 + 48) + 16 * 8
"""Two layers of 16 x 48 with rank 4, and a head of 8 tokens."""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def run(directory: Path, **tables: Any) -> Any:
    settings = {
        "data": {"name": f"{EXAMPLES}/my_transformer.py:Patterns"},
        "partition": "natural",
        "clients": {"count": 4},
        "task": "next-token",
        "model": f"{EXAMPLES}/my_transformer.py:GPT2",
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


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_frozen_layer_has_no_gradient_in_the_operations(kind: type[nn.Module]):
    def build() -> nn.Module:
        # Conv1D of transformers takes its outputs first.
        first = kind(4, 3) if kind is nn.Linear else kind(3, 4)
        return Adapters(layers=("0",), rank=2).adapted(lambda: nn.Sequential(first, nn.Linear(3, 5)))

    task = classification(build, (4,))
    forward = flops.forward_flops(task.weight_uses, params=task.init(0))
    frozen, adapter = 4 * 3 + 3 * 5, 4 * 2 + 2 * 3
    assert forward == 2 * (frozen + adapter)
    assert flops.gradient_flops(task.weight_uses, forward) == 4 * frozen + 6 * adapter


def test_only_adapters_travel_and_the_backbone_stays(tmp_path: Path):
    found = run(tmp_path / "run")
    assert set(found.clients["downlink_bits"]) == {32 * NUM_TRAINED}
    one, two = (
        load_file(path / "models" / "global.safetensors")
        for path in (found.directory, run(tmp_path / "next", rounds=3).directory)
    )
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved == {name for name in one if "lora" in name or "lm_head" in name}
    inputs = torch.randint(0, 8, (3, 12))
    assert found.model()(inputs).shape == (3, 12, 8)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"method": {"name": "fedpse", "lr": 0.1, "keep_ratio": 0.5}},
        {"uplink": {"name": "topk", "keep_ratio": 0.2}},
        {"parts": {"personal": ["*lora_B*"]}},
        {"adapters": {**LORA, "dora": True}},
        {"adapters": {**LORA, "factors": "B"}},
        {"adapters": {**LORA, "merged": True}, "method": {"name": "flora", "lr": 0.1, "batch_size": 8}},
    ],
    ids=["fedavg", "fedpse", "topk", "personal", "dora", "factor B", "flora"],
)
def test_methods_and_compressors_learn_on_adapters(tables: Any, tmp_path: Path):
    found = run(tmp_path / "run", rounds=4, **tables)
    losses = found.frame["own/loss"]
    assert losses.iloc[-1] < 0.99 * losses.iloc[0]
    stacked = run(tmp_path / "stacked", rounds=1, runtime={"executor": "inline", "engine": "vmap"}, **tables)
    assert stacked.frame["train/loss"].iloc[0] == pytest.approx(found.frame["train/loss"].iloc[0], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"factors": "B"}, {"1.lora_B.default.weight"}),
        ({"merged": True}, {"1.lora_A.default.weight", "1.lora_B.default.weight", "1.base_layer.weight"}),
        ({"factors": "B", "dora": True}, {"1.lora_B.default.weight", "1.lora_magnitude_vector.default.weight"}),
        (
            {"factors": "B", "trained": ("1.bias", "2.*")},
            {"1.lora_B.default.weight", "1.base_layer.bias", "2.weight", "2.bias"},
        ),
    ],
    ids=["factors", "merged", "dora", "bias of an adapted layer"],
)
def test_settings_say_what_is_trained(settings: Any, trained: set[str]):
    adapted = Adapters(layers=("1",), rank=2, **settings).adapted(network)
    assert {name for name, parameter in adapted.named_parameters() if parameter.requires_grad} == trained


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_dora_starts_from_the_norms_of_a_files_weights(kind: type[nn.Module], tmp_path: Path):
    def build() -> nn.Sequential:
        return nn.Sequential(kind(3, 5) if kind is nn.Linear else kind(5, 3), nn.Linear(5, 2))

    frozen, path = build(), tmp_path / "start.safetensors"
    save_file({name: tensor + 0.3 for name, tensor in frozen.state_dict().items()}, path)
    frozen.load_state_dict(load_file(path))
    adapted = Network(Adapters(layers=("0",), rank=2, dora=True).builder(build), (3,))
    params = adapted.keep_constants(read_backbone(path, adapted.first_weights(0), set(), "model"))
    inputs = torch.randn(4, 3)
    torch.testing.assert_close(adapted(params, inputs), frozen(inputs))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_backbone_starts_from_a_file_by_the_names_of_its_layers(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shapes = load_file(run(tmp_path / "first").directory / "models/global.safetensors")
    file = {name.replace(".base_layer.", "."): tensor + 0.01 for name, tensor in shapes.items() if "lora" not in name}
    del file["model.lm_head.weight"]
    file["pooler.weight"] = torch.ones(2)
    path = tmp_path / "backbone"
    save_file(file, path) if form == "safetensors" else torch.save({"state_dict": file}, path)
    model = {"name": f"{EXAMPLES}/my_transformer.py:GPT2", "start": str(path)}
    with caplog.at_level(logging.INFO, "rayfl"):
        found = load_file(run(tmp_path / "run", model=model).directory / "models/global.safetensors")
    layer, tokens = "model.transformer.h.0.attn.c_attn", "model.transformer.wte.weight"
    assert torch.equal(found[f"{layer}.base_layer.weight"], file[f"{layer}.weight"])
    assert torch.equal(found[tokens], file[tokens])
    assert "pooler.weight is left over" in caplog.text and "lm_head.weight starts at random" in caplog.text
    del file[tokens]
    save_file(file, path)
    with refused(names=["backbone", repr(tokens)]):
        run(tmp_path / "other", model=model)


@pytest.mark.parametrize(
    ("adapters", "names"),
    [
        ({"layers": ["*.c_atn"]}, ["adapters.layers", "'*.c_atn'", "lm_head"]),
        ({"layers": ["*.c_attn"], "trained": ["hed.*"]}, ["adapters.trained", "'hed.*'"]),
        ({"layers": []}, ["adapters.layers"]),
        ({"layers": ["*.lm_head"], "rank": 0}, ["adapters.rank=0"]),
    ],
)
def test_adapters_of_no_layer_are_refused(adapters: Any, names: list[str], tmp_path: Path):
    with refused(names=names):
        run(tmp_path / "run", adapters=adapters)


def test_frozen_parts_are_trained_by_nobody_and_not_sent(tmp_path: Path):
    """FFA-LoRA (Sun et al., ICLR 2024): A stays as it was drawn, B is trained, and the global model is complete."""
    plain, ffa = run(tmp_path / "plain"), run(tmp_path / "ffa", parts={"frozen": ["*lora_A*"]})
    drawn = run(tmp_path / "drawn", rounds=1, method={"name": "fedavg", "lr": 1e-12, "batch_size": 8})
    models = [load_file(results.directory / "models" / "global.safetensors") for results in (drawn, ffa)]
    of_a, of_b = ([name for name in models[0] if f"lora_{which}" in name] for which in "AB")
    assert of_a and all(torch.equal(models[1][name], models[0][name]) for name in of_a)
    assert all(models[1][name].count_nonzero() for name in of_b)
    # Two layers whose A has 16 x 4 entries, for four clients in two rounds.
    assert sum(plain.rounds.uplink_bits - ffa.rounds.uplink_bits) == 32 * 2 * (16 * 4) * 4 * 2
    assert "pooled/accuracy" in ffa.summary["final"] and ffa.model().network is not None
    with refused(names=["parts.frozen", "'*lora_C*'", "lora_A"]):
        run(tmp_path / "wrong", parts={"frozen": ["*lora_C*"]})
