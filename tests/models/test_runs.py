"""Whole experiments with models of texts and with dropout, and what is refused before they start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.data.datasets import Dataset, Examples
from rayfl.data.sources.imdb import IMDB
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.models.text import CharLSTM, MeanEmbedding
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState, simulate
from rayfl.rounds.setup import Setup
from rayfl.tasks.trial import Trial
from tests.bound_tasks import classification
from tests.data.files import write_tff
from tests.refusals import refused

IMAGES = {"name": "synthetic", "shape": [1, 10, 10], "samples_per_group": 12, "num_groups": 3, "num_classes": 3}
VERSE = "the cat sat on the mat and " * 2


def experiment(**values: Any) -> Experiment:
    return Experiment(**{"rounds": 2, "partition": "iid", "clients": {"count": 3}, **values})


def played(here: Setup) -> tuple[list[RoundRecord], RunState]:
    records: list[RoundRecord] = []
    run_state = simulate(here, InlineExecutor(here), lambda record, run_state: records.append(record))
    return records, run_state


def parameters(here: Setup) -> torch.Tensor:
    _, run_state = played(here)
    return torch.cat([tensor.flatten() for tensor in here.server_half.model(run_state.server).values()])


def test_dropout_belongs_to_the_run_and_not_to_torch_s_seed():
    method = {"name": "fedavg", "lr": 0.1, "batch_size": 4}

    def trained(early: float, late: float) -> torch.Tensor:
        model = {"name": "emnist-cnn", "dropout": [early, late]}
        return parameters(prepare(experiment(data=IMAGES, model=model, method=method)))

    first = trained(0.25, 0.5)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(99)
        assert torch.equal(first, trained(0.25, 0.5))
    assert not torch.equal(first, trained(0.0, 0.0))


@pytest.mark.slow
def test_a_method_learns_the_next_character(tmp_path: Path):
    users = {name: {"snippets": [VERSE[shift:]]} for shift, name in enumerate(("ROMEO", "NURSE", "PARIS"))}
    for split in ("train", "test"):
        write_tff(tmp_path / "plays" / f"shakespeare_{split}.h5", users)
    here = prepare(
        experiment(
            rounds=12,
            data={"name": "shakespeare", "root": str(tmp_path / "plays"), "cache": str(tmp_path / "cache")},
            partition="natural",
            model={"name": "char-lstm", "hidden": 24},
            method={"name": "fedavg", "optimizer": "adam", "lr": 0.02, "batch_size": 8},
            evaluation={"every": 4},
        )
    )
    assert here.initial["embedding.weight"].shape == (90, 8) and here.initial["head.weight"].shape == (90, 24)
    records, _ = played(here)
    losses = [record.means["pooled/loss"] for record in records if "pooled/loss" in record.means]
    # Uniform guesses of 90 characters lose log 90 = 4.5; the verse has 12 of them, of which the blank is a fifth.
    assert losses[-1] < 0.6 * np.log(90)
    assert records[-1].means["pooled/accuracy"] > 0.2


def reviews(folder: Path, **options: Any) -> IMDB:
    for name in ("train/neg", "train/pos", "test/neg", "test/pos"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(6):
            word = "bad" if name.endswith("neg") else "good"
            (folder / name / f"{number}_1.txt").write_text(f"a {word} film " * (number % 3 + 1))
    return IMDB(root=folder, **options)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_method_tells_good_reviews_from_bad_ones(tmp_path: Path, engine: str):
    here = prepare(
        experiment(
            data=reviews(tmp_path, length=10, vocabulary=6),
            model={"name": "mean-embedding", "vocabulary": 6},
            method={"name": "fedavg", "lr": 3.0, "epochs": 30, "batch_size": 3},
            runtime={"engine": engine},
        )
    )
    assert here.dataset.train.inputs[0].tolist()[3:] == [0] * 7
    assert played(here)[0][-1].means["pooled/accuracy"] == 1.0


def texts(largest: int, vocabulary: int | None = None) -> Dataset:
    train = Examples(np.array([[0, 1, 2], [3, 0, 0]]), np.array([0, 1]))
    test = Examples(np.array([[1, largest, 0]]), np.array([1]))
    return Dataset(name="texts", train=train, test=test, num_classes=2, kind="text", vocabulary=vocabulary)


def checked(model: CharLSTM | MeanEmbedding, dataset: Dataset) -> None:
    task = classification(model.builder(dataset.input_shape, dataset.num_classes), dataset.input_shape)
    Trial(task.network, task.task, dataset, model, task.init(0)).check()


def test_a_vocabulary_that_is_too_small_is_refused():
    checked(MeanEmbedding(vocabulary=8), texts(largest=7))
    checked(MeanEmbedding(vocabulary=20), texts(largest=7, vocabulary=20))
    for dataset, kinds in ((texts(largest=8), 9), (texts(largest=3, vocabulary=9), 9)):
        with refused(names=["mean-embedding", "8 tokens", "texts", f"model.vocabulary={kinds}"]):
            checked(MeanEmbedding(vocabulary=8), dataset)
    with refused(names=["char-lstm", "2 tokens", "model.vocabulary=5"]):
        checked(CharLSTM(), texts(largest=4))
    checked(CharLSTM(vocabulary=5), texts(largest=4))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("vgg11", ["vgg11", "[channels, height, width]", "at least 32x32", "[1, 10, 10]"]),
        ("char-lstm", ["tokens", "[length]", "[1, 10, 10]"]),
    ],
)
def test_models_that_do_not_fit_images(model: str, names: list[str]):
    with refused(names=names):
        prepare(experiment(data=IMAGES, model=model, method="fedavg"))


def test_text_models_do_not_take_vectors():
    data = {"name": "synthetic", "dim": 8}
    with refused(names=["char-lstm", "tokens", "synthetic"]):
        prepare(experiment(data=data, model="char-lstm", method="fedavg"))
    with refused(names=["engine='vmap'", "dropout", "recurrent", "engine='loop'"]):
        prepare(experiment(data=IMAGES, model="emnist-cnn", method="fedavg", runtime={"engine": "vmap"}))
