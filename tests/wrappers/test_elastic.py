"""Elastic aggregation against its equations in float64, around methods that know nothing of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl import toml
from rayfl.choices.kinds import named
from rayfl.data.batches import Batch, schedule
from rayfl.determinism import seeding
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.table import read_table
from rayfl.gather import Aggregate
from rayfl.methods.base import Method, PeerHalf, Stage
from rayfl.methods.server.fedavg import FedAvg
from rayfl.models.dense import Logistic
from rayfl.rounds.setup import Setup
from rayfl.wrappers.elastic import Elastic, ElasticAggregation, ElasticHyper
from tests.bound_tasks import classification
from tests.methods.reference import DIM, NUM_CLASSES, Vectors, doubles, initial, played, setup_of, trained
from tests.population.statuses import with_status
from tests.refusals import refused

P = 21
"""Parameters of the logistic regression, 6 features and 3 classes."""

HYPER = {"lr": 0.5, "batch_size": 4}


def around(setup: Setup, **hyper: Any) -> Setup:
    """The same experiment with a third of each client's examples held out, and Elastic around its method."""
    partition = setup.partition.hold_out(0.0, 0.34, np.random.default_rng(0))
    population = replace(setup.population, num_examples=partition.train.sizes)
    return replace(
        setup, method=Elastic(setup.method, Elastic.Hyper(**hyper)), partition=partition, population=population
    )


def table(method: Mapping[str, Any] | str, **more: Any) -> Experiment:
    tables: dict[str, Any] = {
        "rounds": 2,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 4},
        "model": {"name": "mlp", "hidden": [12]},
        "method": method,
        **more,
    }
    return Experiment(**tables)


def sensitivity(setup: Setup, round: int, client: int, params: Vectors) -> Vectors:
    """Omega_i by Eq. 5: with F = W x + b the gradient of mean_n ||F_n||^2 is 2/n F^T x, and 2/n sum F for b."""
    hyper = setup.method.hyper
    assert isinstance(hyper, ElasticHyper)
    rows, inputs = setup.partition.heldout[client], setup.dataset.train.inputs.astype(np.float64)
    generator = seeding.generator(setup.seed, round, client, "train/sensitivity/batches")
    size = hyper.batch_size or None
    omega = {name: np.zeros_like(value) for name, value in params.items()}
    sizes = list[Vectors]()
    for batch in schedule(len(rows), epochs=1, steps=None, batch_size=size, generator=generator):
        x = inputs[rows[batch]]
        outputs = x @ params["1.weight"].T + params["1.bias"]
        gradient = {"1.weight": 2 / len(x) * outputs.T @ x, "1.bias": 2 / len(x) * outputs.sum(axis=0)}
        if hyper.sensitivity == "outputs":
            # Output c depends on row c alone: its gradient is the mean input, and 1 for the bias.
            gradient = {"1.weight": np.tile(x.mean(axis=0), (outputs.shape[1], 1)), "1.bias": np.ones_like(outputs[0])}
        sizes.append({name: np.abs(value) for name, value in gradient.items()})
        omega = {name: hyper.mu * omega[name] + (1 - hyper.mu) * np.abs(gradient[name]) for name in omega}
    if hyper.average == "polyak":
        return {name: np.mean([size[name] for size in sizes], axis=0) for name in omega}
    return omega


def expected(setup: Setup, inner: Setup) -> tuple[list[Vectors], list[Vectors]]:
    """The models after every round, and every round's ratios Omega / max(Omega), by Algorithm 1 with FedAvg."""
    hyper = setup.method.hyper
    assert isinstance(hyper, ElasticHyper)
    params, models, ratios = initial(setup), [], []
    for round in range(setup.rounds):
        clients = with_status(setup.population.sample_round(round), "delivered")
        shares = np.array([len(setup.partition.train[client]) for client in clients], float)
        shares /= shares.sum()
        ends = [trained(inner, round, client, params)[0] for client in clients]
        if round % hyper.every == 0:
            omegas = [sensitivity(setup, round, client, params) for client in clients]
            omega = {name: np.tensordot(shares, [each[name] for each in omegas], axes=1) for name in params}
            largest = {name: value.max() for name, value in omega.items()}
            if hyper.group == "module":
                largest = dict.fromkeys(omega, max(largest.values()))
            ratio = {name: value / largest[name] for name, value in omega.items()}
        ratios.append(ratio)
        delta = {name: params[name] - np.tensordot(shares, [end[name] for end in ends], axes=1) for name in params}
        zeta = {name: 1 + hyper.tau - ratio[name] for name in params}
        if hyper.factors == "mean":
            zeta = {name: np.full_like(value, value.mean()) for name, value in zeta.items()}
        params = {name: params[name] - zeta[name] * delta[name] for name in params}
        models.append(params)
    return models, ratios


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"tau": 0.8, "mu": 0.5, "batch_size": 2},
        {"tau": 1.0, "mu": 0.0, "batch_size": 2, "group": "module"},
        {"mu": 0.8, "batch_size": 0, "every": 2},
        {"tau": 0.3, "factors": "mean"},
        {"sensitivity": "outputs", "batch_size": 2, "tau": 0.8},
        {"average": "polyak", "batch_size": 2, "applied": "after"},
        {"average": "polyak", "batch_size": 3, "sensitivity": "outputs", "group": "module", "tau": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("clients", [{}, {"per_round": 3, "dropout_after_training": 0.2}], ids=str)
def test_fedavg_with_elastic_follows_algorithm_1(hyper: dict[str, Any], clients: dict[str, Any]):
    plain = setup_of("fedavg", HYPER, sizes=(12, 6, 17, 9, 11), clients=clients, rounds=4)
    # A task that knows its last layer.
    task = classification(Logistic().builder((DIM,), NUM_CLASSES), (DIM,))
    plain = replace(plain, method=plain.method.with_task(task))
    here = around(plain, **hyper)
    inner = replace(here, method=plain.method)
    models, ratios = expected(here, inner)
    tau = here.method.hyper.model_dump()["tau"]
    for (record, run_state), model, ratio in zip(played(here), models, ratios, strict=True):
        for name, value in model.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-5, atol=1e-6)
        # The share with zeta > 1 is the distribution function of the normalised sensitivity at tau.
        every = np.concatenate([value.ravel() for value in ratio.values()])
        below = every < tau
        assert record.means["elastic/boosted_share"] == below.mean()
        assert record.means["elastic/mean_factor"] == pytest.approx(1 + tau - every.mean(), rel=1e-5)
        assert 0 < below.mean() < 1


class Watching(FedAvg):
    """FedAvg that shows what its server was given."""

    def server_update(self, server, received, delivered, ctx):
        self.seen.append((dict(received), set(server)))  # type: ignore[attr-defined]
        return super().server_update(server, received, delivered, ctx)


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("every", [1, 3])
def test_zeta_reaches_from_tau_to_one_more(tau: float, every: int):
    plain = setup_of("fedavg", HYPER, rounds=3)
    inner = Watching(plain.method.task, Watching.Hyper(**HYPER))
    inner.seen = []  # type: ignore[attr-defined]
    here = around(replace(plain, method=inner), tau=tau, batch_size=2, every=every)
    elastic = here.method
    assert isinstance(elastic, Elastic)
    omega = {name: torch.rand(50, 7) for name in ("a.weight", "b.weight")}
    zeta = {name: elastic.factors(ratio) for name, ratio in elastic.normalised(omega).items()}
    for name, value in zeta.items():
        assert value.flatten()[omega[name].argmax()] == torch.tensor(tau)
        assert value.min() == torch.tensor(tau)
        assert value.max() <= 1 + tau
    # The inner method sees its own messages and its own state.
    played(here)
    assert [(list(received), state) for received, state in inner.seen] == [(["delta"], {"params"})] * 3  # type: ignore[attr-defined]


def test_modules_share_one_maximum():
    elastic = Elastic(FedAvg(setup_of("fedavg", {}).method.task), Elastic.Hyper(group="module"))
    ratios = elastic.normalised(
        {"a.weight": torch.tensor([1.0, 4.0]), "a.bias": torch.tensor([2.0]), "b.bias": torch.tensor([3.0])}
    )
    assert {name: ratio.tolist() for name, ratio in ratios.items()} == {
        "a.weight": [0.25, 1.0],
        "a.bias": [0.5],
        "b.bias": [1.0],
    }


def test_where_nothing_is_sensitive_nothing_changes():
    # Parameters of zero: the output is zero whatever the input, and so is the gradient of its squared norm.
    plain = setup_of("fedavg", HYPER, rounds=1)
    zeros = {name: np.zeros_like(value) for name, value in plain.initial_arrays.items()}
    here = around(replace(plain, initial_arrays=zeros))
    ((record, run_state),) = played(here)
    ((_, other),) = played(replace(here, method=plain.method))
    assert record.means["elastic/boosted_share"] == 0.0
    for name, value in other.server["params"].items():
        assert value.abs().max() > 0
        assert torch.equal(run_state.server["params"][name], value)


def test_a_tensor_without_a_sensitivity_is_left_alone():
    # A delta of fewer or other tensors than the model: what was not measured has zeta = 1.
    elastic = around(setup_of("fedavg", {})).method
    assert isinstance(elastic, Elastic)
    sent = {"1.weight": torch.ones(2), "extra": torch.ones(2)}
    server = {"params": {"1.weight": torch.zeros(2), "extra": torch.zeros(2)}}
    received = {
        "delta": Aggregate(elastic.gather["delta"], (sent,), 1.0, count=1),
        "sensitivity": Aggregate(
            elastic.gather["sensitivity"], ({"1.weight": torch.tensor([1.0, 4.0])},), 1.0, count=1
        ),
    }
    ctx = setup_of("fedavg", {}).context(0, elastic.plan(0, 0.5), seeding.NOBODY, "server")
    state, metrics = elastic.server_update(server, received, [0], ctx)
    assert state["params"]["1.weight"].tolist() == [-1.25, -0.5]
    assert state["params"]["extra"].tolist() == [-1.0, -1.0]
    assert metrics["elastic/boosted_share"] == 0.25


@pytest.mark.parametrize(
    ("hyper", "bits"),
    [
        ({}, [32, 32, 32, 32]),
        ({"dtype": "fp16"}, [16, 16, 16, 16]),
        ({"dtype": "bf16", "every": 3}, [16, 0, 0, 16]),
    ],
    ids=str,
)
def test_the_sensitivity_is_billed(hyper: dict[str, Any], bits: list[int]):
    here = around(setup_of("fedavg", HYPER, rounds=4), **hyper)
    rounds = [record for record, _ in played(here)]
    # Delta, the sensitivity, and the number of examples.
    assert [{row.uplink_bits for row in record.clients} for record in rounds] == [{(32 + b) * P + 64} for b in bits]
    assert {row.downlink_bits for record in rounds for row in record.clients} == {32 * P}
    # And the held-out examples are work only where they are looked at.
    for record, b in zip(rounds, bits, strict=True):
        for row in record.clients:
            held = len(here.partition.heldout[row.client]) if b else 0
            assert row.num_samples == len(here.partition.train[row.client]) + held


def test_dropout_is_off_while_sensitivity_is_measured():
    task = classification(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.9), nn.Linear(8, 2)))
    without = classification(lambda: nn.Sequential(nn.Linear(3, 8), nn.Identity(), nn.Linear(8, 2)))
    params, batch = task.init(1), Batch(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))
    stage = Stage("sensitivity", split="heldout", epochs=1)
    seen = []
    for each in (task, without):
        carry = {"params": params, "sensitivity": {name: torch.zeros_like(t) for name, t in params.items()}}
        seen.append(Elastic(FedAvg(each)).step(carry, batch, stage=stage)["sensitivity"])
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in params)
    assert task.network.module.training


DELTA_METHODS = [
    name
    for name, kind in named(Method).items()
    if not (issubclass(kind, PeerHalf) or isinstance(kind.gather, property) or kind.capabilities.needs_everyone)
    and "delta" in kind.gather
    and kind.capabilities.delta_of_network
]


@pytest.mark.parametrize("name", ["fedcp", "fedpac", "gpfl", "pfedhn"])
def test_methods_whose_delta_is_not_of_the_network_are_refused(name: str):
    with refused(names=["elastic", "delta of the network", "remove it"]):
        prepare(table(name, wrap="elastic", splits={"heldout_ratio": 0.1}))


@pytest.mark.parametrize("name", DELTA_METHODS)
def test_every_method_with_a_delta_can_be_wrapped(name: str):
    ends = []
    for wrap in ((), "elastic", {"name": "elastic", "tau": 1.5, "every": 2}):
        setup = prepare(table(name, wrap=wrap, splits={"heldout_ratio": 0.1}))
        *_, (record, run_state) = played(setup)
        ends.append(doubles(run_state.server["params"]))
        assert ("elastic/boosted_share" in record.means) == (wrap != ())
    for other in ends[1:]:
        assert any(not np.array_equal(value, other[key]) for key, value in ends[0].items())


def test_the_experiment_file_says_it(tmp_path):
    plain, on, off = (table("fedavg", **extra) for extra in ({}, {"wrap": "elastic"}, {"wrap": []}))
    assert plain == off != on
    assert on.wrap == (ElasticAggregation(),)
    tuned = table({"name": "fedavg", "lr": 0.1}, wrap={"name": "elastic", "tau": 0.3, "every": 5})
    for experiment in (on, tuned, plain):
        assert Experiment(**experiment.as_dict()) == experiment
        path = tmp_path / "experiment.toml"
        path.write_text(toml.dumps(experiment.as_dict()))
        assert Experiment(**read_table(path)) == experiment
    setup = prepare(tuned)
    assert isinstance(setup.method, Elastic)
    assert isinstance(setup.method.inner, FedAvg)
    assert (setup.method.hyper.tau, setup.method.hyper.every) == (0.3, 5)
    assert setup.method.inner.hyper.model_dump()["lr"] == 0.1
    # A tenth is held out, and no longer trained on.
    full = prepare(plain).partition
    for client in range(4):
        assert len(setup.partition.heldout[client]) == round(0.1 * len(full.train[client]))
        both = np.concatenate([setup.partition.heldout[client], setup.partition.train[client]])
        assert sorted(both) == sorted(full.train[client])


@pytest.mark.parametrize(
    ("elastic", "names"),
    [
        ({"taus": 0.3}, ["wrap.taus", "tau"]),
        ({"tau": -1.0}, ["wrap.tau=-1.0", "at least 0"]),
    ],
)
def test_a_mistake_gets_one_sentence(elastic: Any, names: list[str]):
    with refused(names=names):
        table("fedavg", wrap={"name": "elastic", **elastic})


@pytest.mark.parametrize(
    ("name", "names"),
    [("local", ["Elastic", "server", "Local"]), ("fedpse", ["FedPSE", "remove"])],
)
def test_what_has_no_delta_is_refused(name: str, names: list[str]):
    with refused(names=names):
        prepare(table(name, wrap="elastic"))


def test_heldout_samples_are_needed():
    with refused(names=["method", "heldout", "splits.heldout_ratio", "0.1"]):
        prepare(table("fedavg", wrap="elastic", splits={"heldout_ratio": 0.0}))
