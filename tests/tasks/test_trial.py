"""What the trial of a model before a run lets through, and what it refuses with its cause."""

import pickle
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.models.skeleton import plain_tensors
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask
from tests.refusals import refused

LOOKUPS = """
import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, input_shape, num_classes, rows=5):
        super().__init__()
        self.first, self.position, self.out = nn.Linear(1, 8), nn.Embedding(rows, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        places = self.position(torch.arange(x.shape[1]))
        return self.out(torch.relu(self.first(x.float()[..., None]) + places).mean(1))


class Categories(nn.Module):
    def __init__(self, num_classes, kinds=9):
        super().__init__()
        self.kind, self.out = nn.Embedding(kinds, 4), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.out(torch.cat([x[:, :4].float(), self.kind(x[:, 4].long())], 1))


class Tokens(nn.Module):
    def __init__(self, num_classes, vocab_size=9):
        super().__init__()
        self.token, self.kind, self.out = nn.Embedding(vocab_size, 4), nn.Embedding(2, 4), nn.Linear(4, num_classes)

    def forward(self, x):
        return self.out((self.token(x) + self.kind.weight[0]).mean(1))


class OneHot(nn.Module):
    def __init__(self, num_classes, rows=9):
        super().__init__()
        self.out, self.rows = nn.Linear(rows, num_classes), rows

    def forward(self, x):
        return self.out(nn.functional.one_hot(x, self.rows).float().mean(1))
"""


def tried(
    tmp_path: Path, source: str, model: str, kind: str = "vector", runtime: dict | None = None, **options: object
) -> Setup:
    """Prepare an experiment with a model of `source`, on rows of five whole numbers from 0 to 8; few rows have an 8."""
    (tmp_path / "mine.py").write_text(source)
    inputs = np.random.default_rng(0).integers(0, 6, (40, 5))
    inputs[20] = 8
    np.savez(tmp_path / "rows.npz", inputs=inputs, labels=np.arange(40) % 2)
    tables = {"rounds": 1, "partition": "iid", "clients": {"count": 2}, "method": "fedavg"}
    data = {"name": "arrays", "path": str(tmp_path / "rows.npz"), "kind": kind}
    model_table = {"name": f"{tmp_path}/mine.py:{model}", **options}
    return prepare(Experiment(**tables, data=data, model=model_table, runtime=runtime or {}))


@pytest.mark.parametrize(
    ("model", "kind", "few", "names"),
    [
        ("Positions", "vector", {"rows": 4}, ["'position'", "4 rows", "looks up 4", "model.rows=5"]),
        ("Positions", "text", {"rows": 4}, ["'position'", "looks up 4", "model.rows=5"]),
        ("Categories", "vector", {"kinds": 8}, ["'kind'", "8 rows", "looks up 8", "arrays", "model.kinds=9"]),
        ("Tokens", "text", {"vocab_size": 8}, ["'token'", "embeds 8 tokens", "has 9", "model.vocab_size=9"]),
        ("OneHot", "text", {"rows": 8}, ["OneHot", "[1, 5]", "smaller than num_classes"]),
    ],
)
def test_an_embedding_may_hold_anything_and_needs_a_row_for_each_number(
    tmp_path: Path, model: str, kind: str, few: dict, names: list[str]
):
    tried(tmp_path, LOOKUPS, model, kind)
    with refused(names=names):
        tried(tmp_path, LOOKUPS, model, kind, **few)


@pytest.mark.parametrize(
    ("model", "kind", "names"),
    [("Tokens", "vector", ["takes tokens", "not text"]), ("logistic", "text", ["takes numbers", "data.kind='vector'"])],
)
def test_tokens_and_numbers_are_told_apart(tmp_path: Path, model: str, kind: str, names: list[str]):
    source = LOOKUPS + "\n\ndef logistic(input_shape, num_classes):\n    return nn.Linear(5, num_classes)\n"
    with refused(names=names):
        tried(tmp_path, source, model, kind)


MODULES = """
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.out = nn.Linear(5, 8), nn.Linear(8, num_classes)

    def hidden(self, x):
        return torch.relu(self.first(x))

    def forward(self, x):
        return self.out(self.hidden(x))


class Double(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.double()


class Complex(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.cfloat))


class Loose(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.scale = torch.ones(8, requires_grad=True)


class InObject(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.settings = SimpleNamespace(scale=torch.ones(8))

    def hidden(self, x):
        return super().hidden(x) * self.settings.scale


class Auxiliary(Net):
    def forward(self, x):
        return (super().forward(x), x) if self.training else super().forward(x)


class Checkpointed(Net):
    def hidden(self, x):
        return checkpoint(super().hidden, x, use_reentrant=False)


class Reentrant(Net):
    def hidden(self, x):
        return checkpoint(super().hidden, x, use_reentrant=True)


class Fixed(Net):
    def forward(self, x):
        assert len(x) == 8, "eight examples"
        return super().forward(x)


class Squeezed(Net):
    def forward(self, x):
        return super().forward(x[:, None]).squeeze()


class Growing(Net):
    def hidden(self, x):
        self.more = nn.Linear(8, 8)
        return self.more(super().hidden(x)) * 0


class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()


class Lookup(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.rows, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, num_classes)

    def forward(self, x):
        return self.out(self.rows(x.long()).mean(1))


def bfloat16(num_classes):
    return Net(num_classes).bfloat16()


def scripted(num_classes):
    return torch.jit.script(nn.Linear(5, num_classes))


same = nn.Linear(5, 2)


def cached():
    return same


class Stated(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.rates = [rate.item() for rate in torch.linspace(0.5, 1, 3)]
        self.scale, self.scales = torch.randn(8), [torch.randn(8)]
        self.tied = self.first
        self.to("cpu")

    def hidden(self, x):
        return super().hidden(x) * self.scale + self.scales[0] * self.rates[1]


class Orthogonal(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        nn.utils.parametrizations.orthogonal(self.first)


class Unset(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        nn.init.constant_(self.first.weight, float("nan"))


class Branching(Net):
    def hidden(self, x):
        return super().hidden(-x if x.sum().item() > 0 else x)


def lazy():
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.LazyConv1d(4, 2), nn.LazyBatchNorm1d(), nn.Dropout(), nn.Flatten(), nn.LazyLinear(2)
    )
"""


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Double", ["'first.weight'", "float64", "float32", ".double()"]),
        ("bfloat16", ["'first.weight'", "bfloat16", "runtime.precision='bf16'"]),
        ("Complex", ["'phase'", "complex64", "view_as_complex"]),
        ("Loose", ["Loose.scale", "nn.Parameter"]),
        ("InObject", ["InObject", "mine.py:", "make it a buffer", "register_buffer"]),
        ("Auxiliary", ["Auxiliary", "a tuple in training", "[2, 2]"]),
        ("Checkpointed", ["Checkpointed", "gradient checkpointing"]),
        ("Reentrant", ["Reentrant", "gradient checkpointing"]),
        ("Fixed", ["inputs [2, 5]", "AssertionError: eight examples", "mine.py:", "batches of any size"]),
        ("Squeezed", ["inputs [1, 5]", "last batch", "returns", "[2]", "outputs [1, 2]"]),
        ("Growing", ["'more'", "__init__", "LazyLinear"]),
        ("Detached", ["Detached", "autograd", "detach()"]),
        ("Lookup", ["'rows.weight'", "sparse=True"]),
        ("Unset", ["Unset", "'first.weight'", "NaN", "initialise"]),
        ("scripted", ["TorchScript"]),
        ("cached", ["same module", "inside the function"]),
        ("same", ["no model", "a function that returns a new module"]),
    ],
)
def test_what_would_fail_in_round_0_is_refused_with_its_cause(tmp_path: Path, model: str, names: list[str]):
    with refused(names=names):
        tried(tmp_path, MODULES, model)


@pytest.mark.parametrize("model", ["Stated", "lazy", "Orthogonal"])
def test_what_needs_a_module_in_memory_works_in_every_process(tmp_path: Path, model: str):
    setup = tried(tmp_path, MODULES, model)
    task = setup.method.task
    batch = setup.data(0).all("train")
    twin = pickle.loads(pickle.dumps(task))  # noqa: S301 (our own)
    assert torch.equal(task.evaluated(setup.first_model, batch), twin.evaluated(setup.first_model, batch))
    assert isinstance(task, NetworkTask)
    if model == "Stated":
        assert set(setup.initial) == {"first.weight", "first.bias", "out.weight", "out.bias"}
        assert {tensor.device.type for _, _, tensor in plain_tensors(task.network.module)} == {"cpu"}
    elif model == "lazy":
        assert setup.initial["5.weight"].shape == (2, 16)


@pytest.mark.parametrize(("model", "in_stacks"), [("Net", True), ("Branching", False)])
def test_what_cannot_run_under_vmap_is_trained_one_by_one(tmp_path: Path, model: str, in_stacks: bool):
    assert not tried(tmp_path, MODULES, model).work_width > 1
    assert (tried(tmp_path, MODULES, model, runtime={"device": "cuda", "num_gpus": 1}).work_width > 1) is in_stacks
    with nullcontext() if in_stacks else refused(names=["engine='vmap'", ".item()", "engine='loop'"]):
        assert tried(tmp_path, MODULES, model, runtime={"engine": "vmap"}).work_width > 1


WRITING = """
import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.out, self.target = nn.Linear(5, num_classes), nn.Linear(5, num_classes).requires_grad_(False)


class Clamped(Linear):
    def forward(self, x):
        self.out.weight.data.clamp_(-0.01, 0.01)
        return self.out(x)


class Averaged(Linear):
    def forward(self, x):
        self.target.weight.mul_(0.9)
        return self.out(x)


class Shifting(Linear):
    def forward(self, x):
        x += 1.0
        return self.out(x)


class Hidden(Linear):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.layers = [nn.Linear(5, 5)]

    def forward(self, x):
        return self.out(self.layers[0](x))


class Probabilities(Linear):
    def forward(self, x):
        return self.out(x).softmax(1)


class Logarithms(Linear):
    def forward(self, x):
        return self.out(x).log_softmax(1)
"""


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Clamped", ["'out.weight'", "writes into its parameter"]),
        ("Averaged", ["'target.weight'", "buffer"]),
        ("Shifting", ["inputs in place", "buffers"]),
        ("Hidden", ["nn.ModuleList"]),
    ],
)
def test_a_model_that_writes_where_others_read_is_refused(tmp_path: Path, model: str, names: list[str]):
    with refused(names=names):
        tried(tmp_path, WRITING, model)


def test_outputs_that_are_probabilities_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tried(tmp_path, WRITING, "Logarithms")
    assert "probabilities" not in caplog.text
    tried(tmp_path, WRITING, "Probabilities")
    assert "'Probabilities' are probabilities" in caplog.text and "logits" in caplog.text
