"""Operations of layers other than plain linear ones and convolutions, by hand; and models that cannot be counted."""

import copy
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from rayfl import Experiment, tree
from rayfl.errors import log_once
from rayfl.experiment.prepare import prepare
from rayfl.methods.server.fedavg import FedAvg
from rayfl.models import flops
from rayfl.models.text import CharLSTM
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.bound_tasks import classification
from tests.methods.reference import setup_of

LENGTH, WIDTH, HEADS = 5, 8, 2


class Calls(nn.Module):
    """Modules, and what is done with them."""

    def __init__(self, call: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.call = nn.ModuleDict(parts), call

    def forward(self, inputs: Tensor) -> Tensor:
        return self.call(inputs, *self.parts.values())


def multiplications(module: nn.Module, *shape: int) -> int:
    """Of one example's forward pass; 0 if they are not counted."""
    return flops.forward_flops(flops.weight_uses(module, shape), params=dict(module.named_parameters())) // 2


def lstm(layer: nn.Module) -> nn.Module:
    return Calls(lambda inputs, layer: layer(inputs)[0], layer=layer)


def made_of(build: Callable[[], nn.Module]) -> Setup:
    """FedAvg on vectors of 6 features and 3 classes."""
    task = classification(build, (6,))
    here = replace(setup_of("fedavg", {}, sizes=(4, 5), rounds=2), method=FedAvg(task, lr=0.1))
    here = replace(here, initial_arrays=tree.to_arrays(task.init(1)))
    check_setup(here)
    return here


@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:LSTM with projections")
@pytest.mark.parametrize("onednn", [True, False])
def test_recurrent_layers(onednn: bool):
    with torch.backends.mkldnn.flags(enabled=onednn):
        # Each of 7 steps multiplies all weights of the 4, 3 or 1 gates: from 3 inputs and from 4 states.
        for gates, kind in ((4, nn.LSTM), (3, nn.GRU), (1, nn.RNN)):
            assert multiplications(lstm(kind(3, 4, batch_first=True)), 7, 3) == 7 * gates * 4 * (3 + 4)
        # Two directions, and a second layer with the states of both as its inputs.
        both = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        assert multiplications(lstm(both), 7, 3) == 7 * 2 * 16 * (3 + 4) + 7 * 2 * 16 * (8 + 4)
        # States are projected from 4 to 2.
        projected = nn.LSTM(3, 4, proj_size=2, batch_first=True)
        assert multiplications(lstm(projected), 7, 3) == 7 * (16 * (3 + 2) + 2 * 4)


def test_each_weight_of_an_lstm_is_used_at_every_step():
    task = classification(CharLSTM(embedding=3, hidden=4, layers=2).builder((7,), 6), (7,))
    uses = task.weight_uses
    assert uses == {f"lstm.weight_{part}_l{layer}": 7 for layer in range(2) for part in ("ih", "hh")} | {
        "head.weight": 1
    }
    params = task.init(0)
    weights = [16 * (3 + 4), 16 * (4 + 4)]
    assert flops.forward_flops(uses, params=params) == 2 * (7 * sum(weights) + 4 * 6)
    # A mask counts in the recurrent layers too.
    mask = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in params.items()}
    mask["lstm.weight_hh_l1"][0] = True
    assert flops.forward_flops(uses, mask) == 2 * 7 * 4


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention(need_weights: bool):
    def call(inputs: Tensor, layer: nn.Module) -> Tensor:
        return layer(inputs, inputs, inputs, need_weights=need_weights)[0]

    made = Calls(call, layer=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    uses = flops.weight_uses(made, (LENGTH, WIDTH))
    # Three projections and one back; scores of all pairs, and sums by them.
    assert multiplications(made, LENGTH, WIDTH) == 4 * LENGTH * WIDTH**2 + 2 * LENGTH**2 * WIDTH
    assert dict(uses) == {"parts.layer.in_proj_weight": LENGTH, "parts.layer.out_proj.weight": LENGTH}
    assert (uses.kept, uses.frozen) == (2 * LENGTH**2 * WIDTH, 0)


def test_attention_is_as_much_as_the_same_layer_written_with_linear_ones():
    def own(inputs: Tensor, qkv: nn.Module, out: nn.Module) -> Tensor:
        parts = qkv(inputs).reshape(1, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts)
        return out(mixed.transpose(1, 2).reshape(1, LENGTH, WIDTH))

    def by_hand(inputs: Tensor, qkv: nn.Module, out: nn.Module) -> Tensor:
        q, k, v = qkv(inputs).chunk(3, dim=-1)
        return out((q @ k.transpose(1, 2)).softmax(dim=-1) @ v)

    expected = 4 * LENGTH * WIDTH**2 + 2 * LENGTH**2 * WIDTH
    for call in (own, by_hand):
        made = Calls(call, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))
        assert multiplications(made, LENGTH, WIDTH) == expected


def test_a_transformer_in_evaluation_has_no_fast_path():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    attention = 4 * LENGTH * WIDTH**2 + 2 * LENGTH**2 * WIDTH
    made = nn.TransformerEncoder(layer, 3)
    assert multiplications(made, LENGTH, WIDTH) == 3 * (attention + 2 * LENGTH * WIDTH * 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_transposed_convolutions():
    # Each of 4 x 4 places of the input is multiplied by all weights of its channels, 3 x 3 of each pair.
    assert multiplications(nn.ConvTranspose2d(2, 6, 3, stride=2), 2, 4, 4) == 16 * 2 * 6 * 9
    assert multiplications(nn.ConvTranspose2d(2, 6, 3, stride=2, groups=2), 2, 4, 4) == 16 * 2 * 3 * 9
    assert multiplications(nn.ConvTranspose1d(8, 4, 3), 8, 16) == 16 * 8 * 4 * 3
    # The plain one: 5 x 5 places of the output, each from one of two groups.
    assert multiplications(nn.Conv2d(4, 6, 3, groups=2, padding=1, stride=2), 4, 9, 9) == 25 * 6 * 2 * 9


COMPUTED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": weight_norm,
    "old spectral_norm": spectral_norm,
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "halved": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Halved()),
}


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_counts_as_the_one_that_it_is_computed_from(name: str):
    made = COMPUTED[name](nn.Linear(6, 4))
    uses = flops.weight_uses(made, (6,))
    ((weight, times),) = uses.items()
    assert (dict(made.named_parameters())[weight].shape, times, uses.kept) == ((4, 6), 1, 0)
    assert multiplications(made, 3, 6) == 3 * 24


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning", "ignore:.*performance drop")
@pytest.mark.parametrize(
    ("name", "engine"), [(name, "loop") for name in COMPUTED] + [("prune", "vmap"), ("weight_norm", "vmap")]
)
def test_models_with_computed_weights_are_trained(name: str, engine: str):
    def model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        first = COMPUTED[name](nn.Linear(64, 8))
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(8, num_classes))

    tables: dict[str, Any] = {"data": "digits", "partition": "iid", "method": {"name": "fedavg", "lr": 0.3}}
    made = Experiment(model=model, clients={"count": 2}, rounds=3, runtime={"engine": engine}, **tables)
    records, _ = play(prepare(made))
    examples = sum(row.num_samples for row in records[0].clients) / 2
    assert records[0].means["flops/training"] == 3 * 2 * (64 * 8 + 8 * 10) * examples
    assert records[-1].means["pooled/accuracy"] > 0.5


def test_weights_used_by_functions_and_in_parts():
    def call(inputs: Tensor, layer: nn.Linear) -> Tensor:
        first, second = layer.weight.chunk(2)
        return functional.linear(inputs, first) + torch.einsum("ni,oi->no", inputs, second)

    made = Calls(call, layer=nn.Linear(6, 4))
    assert dict(flops.weight_uses(made, (6,))) == {"parts.layer.weight": 1}
    # Only a half is used: half a use an entry.
    halved = Calls(lambda inputs, layer: functional.linear(inputs, layer.weight[:2]), layer=nn.Linear(6, 4))
    assert dict(flops.weight_uses(halved, (6,))) == {"parts.layer.weight": 0.5}
    assert multiplications(halved, 6) == 12


def test_products_of_weights_alone_are_no_work_for_an_example():
    def merged(inputs: Tensor, base: nn.Linear, a: nn.Linear, b: nn.Linear) -> Tensor:
        return functional.linear(inputs, base.weight + b.weight @ a.weight)

    parts = {"a": nn.Linear(6, 2, bias=False), "b": nn.Linear(2, 4, bias=False)}
    made = Calls(merged, base=nn.Linear(6, 4).requires_grad_(False), **parts)
    uses = flops.weight_uses(made, (6,))
    # What is merged has a gradient, by that of the two others.
    assert (dict(uses), uses.kept, uses.frozen) == ({}, 24, 0)
    assert flops.gradient_flops(uses, flops.forward_flops(uses)) == 3 * 2 * 24


def test_products_by_buffers_have_no_gradient_of_their_own():
    class Features(nn.Module):
        omega: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("omega", torch.ones(6, 10))
            self.head = nn.Linear(10, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(torch.cos(inputs @ self.omega))

    uses = flops.weight_uses(Features(), (6,))
    assert (dict(uses), uses.kept, uses.frozen, uses.head) == ({"head.weight": 1}, 60, 60, "head")


def test_lookups_norms_and_pixels_take_nothing():
    made = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 2))
    assert multiplications(made, 3) == 24
    made = nn.Sequential(
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.MaxPool2d(2), nn.Conv2d(1, 2, 3), nn.Softmax(1)
    )
    assert multiplications(made, 1, 5, 5) == 9 * 2 * 9


class Packed(nn.Module):
    """Sequences that end at the first token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 3), nn.LSTM(3, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(dim=1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True)
        return self.lstm(packed)[1][0][-1]


def test_a_text_is_counted_at_its_full_length():
    assert multiplications(Packed(), 7) == 7 * 16 * (3 + 4)


def test_uses_survive_copies():
    uses = flops.Uses({"a": 2}, kept=7, frozen=3, head="a")
    for twin in (copy.copy(uses), copy.deepcopy(uses), pickle.loads(pickle.dumps(uses))):  # noqa: S301 (our own)
        assert (dict(twin), twin.kept, twin.frozen, twin.head) == ({"a": 2}, 7, 3, "a")


def fails(inputs: Tensor, layer: nn.Module) -> Tensor:
    assert len(inputs) > 1, "a batch of one"
    return layer(inputs)


def divides(inputs: Tensor, layer: nn.Module) -> Tensor:
    return layer(inputs) if len(inputs) > 1 else layer(inputs) / (1 // 0)


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "AssertionError: a batch of one": lambda: Calls(fails, layer=nn.Linear(6, 3)),
    "ZeroDivisionError": lambda: Calls(divides, layer=nn.Linear(6, 3)),
    "aten::_trilinear": lambda: Calls(lambda inputs, layer: layer(inputs, inputs), layer=nn.Bilinear(6, 6, 3)),
    "rayfl_tests::product": lambda: Calls(lambda inputs, layer: product(inputs, layer.weight), layer=nn.Linear(6, 3)),
}


@torch.library.custom_op("rayfl_tests::product", mutates_args=())
def product(inputs: Tensor, weight: Tensor) -> Tensor:
    return inputs @ weight.T


@product.register_fake
def _(inputs: Tensor, weight: Tensor) -> Tensor:
    return inputs.new_empty(len(inputs), len(weight))


product.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.saved_tensors[1], gradient.T @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("why", UNKNOWN)
def test_what_cannot_be_counted_has_no_number_one_warning_and_ends_no_run(why: str, caplog: pytest.LogCaptureFixture):
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "rayfl"):
        here = made_of(UNKNOWN[why])
        assert len(caplog.records) == 1 and why in caplog.text and "flops/training" in caplog.text
        records, _ = play(here)
    assert len(caplog.records) == 1
    assert all("flops/training" not in record.means for record in records)
    assert not any(metric.name == "flops/training" for record in records for metric in record.metrics)
    assert here.method.task.weight_uses == {} and here.forward_flops == 0


def test_an_unknown_operator_leaves_the_head_known():
    def call(inputs: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
        return head(body(inputs, inputs))

    made = Calls(call, body=nn.Bilinear(6, 6, 4), head=nn.Linear(4, 3))
    uses = flops.weight_uses(made, (6,))
    assert not uses and uses.head == "parts.head"


def test_counting_draws_nothing():
    made = Calls(lambda inputs, layer: layer(torch.randn_like(inputs)), layer=nn.Linear(6, 3))
    before = torch.get_rng_state()
    flops.weight_uses(made, (6,))
    assert torch.equal(torch.get_rng_state(), before)


PLUGIN = """
import torch
from rayfl.methods.base import Capabilities
from rayfl.methods.server.fedavg import FedAvg


class Widths(FedAvg):
    paper = "a sub-model of the leading units, after HeteroFL (Diao, Ding, Tarokh, ICLR 2021)"
    capabilities = Capabilities(honours_retention=True)

    def init_client(self, client, params, draws):
        return {"width": torch.tensor(client.retention_ratio)}

    def mask(self, state):
        mask = {"1.weight": torch.zeros(16, 64, dtype=torch.bool), "3.weight": torch.zeros(10, 16, dtype=torch.bool)}
        units = int(state["width"] * 16)
        mask["1.weight"][:units], mask["3.weight"][:, :units] = True, True
        return mask

    def finish(self, state, carry, ctx):
        return self.finished(state, {"delta": self.delta(carry)}, carry, ctx)
"""


def test_the_mask_of_a_plug_in_counts_by_itself(tmp_path: Path):
    (tmp_path / "widths.py").write_text(PLUGIN)
    tables: dict[str, Any] = {
        "data": "digits",
        "partition": "iid",
        "model": {"name": "mlp", "hidden": [16]},
        "method": {"name": f"{tmp_path / 'widths.py'}:Widths"},
        "rounds": 1,
    }
    clients: dict[str, Any] = {"count": 2, "retention_ratio": [0.25, 1.0], "examples_per_s": 100.0}
    records, _ = play(prepare(Experiment(clients=clients, **tables)))
    values = {one.client: one.value for one in records[0].metrics if one.name == "flops/training"}
    slow = {row.client: row for row in records[0].clients}
    for client, units in ((0, 4), (1, 16)):
        # The mask names the weights alone; biases take nothing.
        assert values[client] == 3 * 2 * (units * 64 + 10 * units) * slow[client].num_samples
    # With sparse_speedup a mask that does not name all tensors shortens the time, too.
    clients["sparse_speedup"] = True
    records, _ = play(prepare(Experiment(clients=clients, **tables)))
    fast = {row.client: row.simulated_s for row in records[0].clients}
    assert [fast[i] / slow[i].simulated_s for i in (0, 1)] == pytest.approx([1 / 4, 1], rel=1e-2)
