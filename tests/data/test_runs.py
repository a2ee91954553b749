"""Two rounds of FedAvg on files in public formats, from the experiment to the recorded metrics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from jobs.cli import main
from rayfl.data.batches import Batch, ClientData
from rayfl.data.sources.imdb import IMDB
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.models.base import Architecture
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.model_sums import model_sums
from rayfl.rounds.setup import Setup
from rayfl.run_directory.play_run import Listener, RunOutput, play_run
from rayfl.run_directory.saved_models import load_model
from tests.data.files import write_cifar, write_tff
from tests.refusals import refused

TEXT = "\n".join(f"{number}. Two households, both alike in dignity!" for number in range(4))
USERS = {name: {"snippets": [TEXT[: 14 + 11 * number]]} for number, name in enumerate(("ROMEO", "NURSE", "PARIS"))}
SIZES = [26, 37, 15]
"""Examples of NURSE, PARIS and ROMEO."""


class Tokens(nn.Embedding):
    """An embedding that takes nothing but int64."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert input.dtype == torch.int64, f"tokens arrived as {input.dtype}"
        return super().forward(input)


class Bag(Architecture):
    """The mean of the tokens' vectors, and a linear layer."""

    name: ClassVar[str] = "bag"
    vocabulary: int = 90

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(
            Tokens(self.vocabulary, 4), nn.AdaptiveAvgPool2d((1, 4)), nn.Flatten(), nn.Linear(4, num_classes)
        )


def experiment(**values: Any) -> Experiment:
    method = {"name": "fedavg", "lr": 0.5, "batch_size": 8}
    return Experiment(**{"rounds": 2, "partition": "natural", "method": method, **values})


def played(setup: Setup, directory: Path) -> list[Mapping[str, float]]:
    means: list[Mapping[str, float]] = []
    directory.mkdir()
    play_run(
        setup,
        InlineExecutor(setup),
        RunOutput(directory),
        Listener(lambda row, means_of_round: means.append(means_of_round)),
    )
    return means


@pytest.fixture
def plays(tmp_path) -> dict[str, Any]:
    for split in ("train", "test"):
        write_tff(tmp_path / "plays" / f"shakespeare_{split}.h5", USERS)
    return {"name": "shakespeare", "root": str(tmp_path / "plays"), "cache": str(tmp_path / "cache")}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_fedavg_on_shakespeare_by_role(tmp_path, plays, engine):
    setup = prepare(experiment(data=plays, clients={"count": 3}, model=Bag(), runtime={"engine": engine}))
    assert setup.population.num_examples.tolist() == SIZES
    means = played(setup, tmp_path / "run")
    assert len(means) == 2
    assert means[1]["train/loss"] < means[0]["train/loss"]
    # The pooled test set has all roles' examples, so its accuracy is the roles' own, weighted by their sizes.
    model = load_model(tmp_path / "run", "global")
    found = model_sums(setup, model, "test", np.arange(sum(SIZES)))
    # The second metric is accuracy, with a sum and a count for each example.
    hits = found.rows[1][0]
    assert means[1]["pooled/accuracy"] == pytest.approx(hits.mean())
    own = [hits[setup.partition.test[client]].mean() for client in range(3)]
    assert means[1]["own/accuracy"] == pytest.approx(np.mean(own))


def test_batches_of_tokens_stay_int64_in_every_way_they_are_made(plays):
    setup = prepare(experiment(data=plays, clients={"count": 3}, model=Bag()))
    data = ClientData(setup.dataset, setup.partition, 0)
    whole_split = data.batches("train", epochs=1, batch_size=8, generator=np.random.default_rng(0))
    few_of_it = data.batches("train", steps=1, batch_size=8, generator=np.random.default_rng(0))
    batches = [next(iter(whole_split)), next(iter(few_of_it)), data.all("test")]
    for batch in batches:
        assert isinstance(batch, Batch)
        assert (batch.inputs.dtype, batch.inputs.shape[1:], batch.labels.dtype) == (torch.int64, (80,), torch.int64)
    assert torch.equal(batches[0].inputs, batches[1].inputs)


def test_fedavg_on_cifar_by_lambda(tmp_path, monkeypatch):
    write_cifar(tmp_path / "cifar", monkeypatch, "CIFAR10", per_file=4)
    data = {"name": "cifar10", "root": str(tmp_path / "cifar")}
    partition = {"name": "lambda-ratio", "ratio": 1.0}
    setup = prepare(experiment(data=data, partition=partition, clients={"count": 4}, model="convnet2"))
    assert setup.population.num_examples.tolist() == [5] * 4
    first, second = (played(setup, tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert 0 <= first[-1]["pooled/accuracy"] <= 1


def test_fedavg_on_film_reviews(tmp_path):
    for name in ("train/neg", "train/pos", "test/neg", "test/pos"):
        (tmp_path / "imdb" / name).mkdir(parents=True)
        for number in range(6):
            word = "bad" if name.endswith("neg") else "good"
            (tmp_path / "imdb" / name / f"{number}_1.txt").write_text(f"a {word} film")
    source = IMDB(root=tmp_path / "imdb", length=4, vocabulary=6)
    method = {"name": "fedavg", "lr": 2.0, "epochs": 20, "batch_size": 3}
    values = {"data": source, "partition": "iid", "clients": {"count": 2}, "method": method}
    means = played(prepare(experiment(model=Bag(vocabulary=6), **values)), tmp_path / "run")
    # One word tells the classes apart.
    assert means[-1]["pooled/accuracy"] == 1.0


def test_a_model_without_an_embedding_is_refused_tokens(plays):
    with refused(names=["logistic", "shakespeare", "tokens", "char-lstm"]):
        prepare(experiment(data=plays, clients={"count": 3}, model="logistic"))
    with refused(names=["bag", "digits", "not text"]):
        prepare(experiment(data="digits", partition="iid", clients={"count": 3}, model=Bag()))


@pytest.mark.parametrize("name", ["femnist", "shakespeare", "imdb", "cifar10", "cifar100"])
def test_missing_files_end_in_one_sentence_and_exit_code_2_before_anything_starts(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    file = tmp_path / "mine.toml"
    file.write_text(
        f'name = "mine"\nrounds = 1\npartition = "iid"\nmodel = "logistic"\nmethod = "fedavg"\n'
        f'clients = {{count = 2}}\ndata = {{name = "{name}", root = "{tmp_path}/empty"}}\n'
    )
    result = CliRunner().invoke(main, ["run", str(file), "--inline"])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1 and "data.root" in result.stderr
    assert not (tmp_path / "runs").exists()
