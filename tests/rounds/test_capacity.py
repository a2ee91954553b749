"""`clients.work = "capacity"` cuts training, and never the stages that measure."""

import pytest

from rayfl.data.batches import amount
from rayfl.experiment.prepare import prepare
from rayfl.population.client import ClientStatus
from rayfl.rounds.participants import planned_examples
from rayfl.testing.executors import play
from tests.contracts.every_method import experiment

SPEEDS = [100.0, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0]
"""Client 0 does a tenth of the training steps."""
CLIENTS = {"work": "capacity", "examples_per_s": SPEEDS}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("name", "measuring"),
    [
        ("subfedavg", "validation"),
        ("lotteryfl", "validation"),
        ("lottery_dsgd", "validation"),
        ("fedfomo", "validation"),
        ("fedavg", "heldout"),
    ],
)
def test_a_slow_client_measures_on_all_its_examples(name: str, measuring: str, engine: str):
    hyper = {"name": name, "lr": 0.1, "batch_size": 10}
    runtime = {"engine": engine}
    wrap = "elastic" if measuring == "heldout" else ()
    made = experiment(
        name, wrap=wrap, clients=CLIENTS, method=hyper, rounds=1, runtime=runtime, evaluation={"every": 0}
    )
    here = prepare(made)
    assert here.population.traits(0).work_share == 0.1
    sizes, sizes_of_train = here.partition.split(measuring).sizes, here.partition.train.sizes
    stages = here.plan(0).stages
    evaluated = sum(-(-sizes[0] // (stage.batch_size or sizes[0])) for stage in stages if stage.split == measuring)
    assert evaluated and sizes[0] > 10
    work = next(row for row in play(here)[0][0].clients if row.client == 0)
    training = [stage for stage in stages if stage.split == "train"]
    trained = [
        amount(sizes_of_train[0], epochs=stage.epochs, steps=stage.steps, batch_size=10, share=0.1)
        for stage in training
    ]
    assert work.num_samples == sum(examples for _, examples in trained) + sizes[0]
    assert work.num_steps == sum(steps for steps, _ in trained) + evaluated
    # The lengths of calls are told from the same work, without rounding to steps.
    told = planned_examples(here, here.plan(0), {0: ClientStatus.DELIVERED})
    whole = sum(sizes_of_train[0] * stage.epochs if stage.epochs else 10 * (stage.steps or 0) for stage in training)
    assert told == pytest.approx(0.1 * whole + sizes[0])
