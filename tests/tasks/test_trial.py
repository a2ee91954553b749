"""What the trial of a model before a run lets through, and what it refuses with its cause."""

from pathlib import Path

import numpy as np
import pytest

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
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


def tried(tmp_path: Path, source: str, model: str, kind: str = "vector", **options: object) -> None:
    """Prepare an experiment with a model of `source`, on rows of five whole numbers from 0 to 8; few rows have an 8."""
    (tmp_path / "mine.py").write_text(source)
    inputs = np.random.default_rng(0).integers(0, 6, (40, 5))
    inputs[20] = 8
    np.savez(tmp_path / "rows.npz", inputs=inputs, labels=np.arange(40) % 2)
    tables = {"rounds": 1, "partition": "iid", "clients": {"count": 2}, "method": "fedavg"}
    data = {"name": "arrays", "path": str(tmp_path / "rows.npz"), "kind": kind}
    prepare(Experiment(**tables, data=data, model={"name": f"{tmp_path}/mine.py:{model}", **options}))


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
