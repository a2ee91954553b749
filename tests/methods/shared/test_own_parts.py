"""Parts that clients keep, against plain torch: FedPer, FedRep, FedBABU, FedBN, LG-FedAvg, and averaged buffers."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rayfl
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Batch, Capabilities, Stage
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.methods.shared.own_parts import OwnParts
from rayfl.rounds import downlinks
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing import contracts
from rayfl.testing.contracts import Normed
from rayfl.testing.executors import contents, play
from tests.refusals import refused

LR, MOMENTUM = 0.1, 0.5
HEAD = ("head.weight", "head.bias")
STATISTICS = ("norm.running_mean", "norm.running_var")
NUM_SHARED = 64 * 12 + 2 * 12
METHOD = {"name": "fedavg", "lr": LR, "momentum": MOMENTUM, "batch_size": 0, "steps": 2}
"""On whole splits, so that a reference need not know the order of batches."""


def made(**tables: Any) -> Setup:
    settings = {
        "rounds": 2,
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 1.0},
        "clients": {"count": 3},
        "model": Normed,
        "method": METHOD,
    }
    return prepare(Experiment(**{**settings, **tables}))


def end(setup: Setup) -> Mapping[str, np.ndarray]:
    """All that a run leaves behind."""
    return contents(InlineExecutor(setup), play(setup)[1][-1])


def first_module(setup: Setup) -> nn.Module:
    module = Normed((1, 8, 8), 10)
    assert isinstance(setup.method, OwnParts)
    module.load_state_dict({**setup.initial, **setup.method.start})
    return module


def train(module: nn.Module, setup: Setup, client: int, stages: Sequence[tuple[int, Sequence[str]]]) -> None:
    """Steps of torch's SGD on the whole split, of the named parameters; each stage begins without momentum."""
    batch = setup.data(client).all("train")
    for steps, names in stages:
        optimizer = torch.optim.SGD([module.get_parameter(name) for name in names], lr=LR, momentum=MOMENTUM)
        for _ in range(steps):
            module.zero_grad()
            nn.functional.cross_entropy(module(batch.inputs), batch.labels).backward()
            optimizer.step()


def reference(
    setup: Setup, own: Sequence[str], stages: Sequence[tuple[int, Sequence[str]]]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The shared tensors after all rounds, and each client's own ones."""
    start = first_module(setup).state_dict()
    shared = {name: tensor for name, tensor in start.items() if name not in own}
    kept = [{name: start[name] for name in own} for _ in range(setup.num_clients)]
    sizes = setup.partition.train.sizes
    for _ in range(setup.rounds):
        trained = []
        for client in range(setup.num_clients):
            module = Normed((1, 8, 8), 10)
            module.load_state_dict({**shared, **kept[client]})
            train(module, setup, client, stages)
            after = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            kept[client] = {name: after[name] for name in own}
            trained.append(after)
        for name, tensor in shared.items():
            if tensor.is_floating_point():
                weighted = [size * after[name] for size, after in zip(sizes, trained, strict=True)]
                shared[name] = torch.stack(weighted).sum(dim=0) / float(sum(sizes))
    return shared, kept


def assert_close(found: np.ndarray, expected: torch.Tensor, place: str) -> None:
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-6, err_msg=place)


BODY = ("body.1.weight", "norm.weight", "norm.bias")
NORM = ("norm.weight", "norm.bias")


@pytest.mark.parametrize(
    ("parts", "own", "stages"),
    [
        ({}, (), [(2, (*BODY, *HEAD))]),
        ({"personal": ["head"]}, HEAD, [(2, (*BODY, *HEAD))]),
        ({"personal": ["head"], "order": "local-first", "personal_steps": 3}, HEAD, [(3, HEAD), (2, BODY)]),
        ({"personal": ["head"], "order": "shared-first"}, HEAD, [(2, BODY), (2, HEAD)]),
        ({"personal": ["*", "!head"], "buffers": "personal"}, (*BODY, *STATISTICS), [(2, (*BODY, *HEAD))]),
        ({"personal": ["BatchNorm1d"], "buffers": "personal"}, (*NORM, *STATISTICS), [(2, (*BODY, *HEAD))]),
    ],
    ids=["BatchNorm", "FedPer", "FedRep", "shared first", "LG-FedAvg", "FedBN"],
)
def test_parts_are_those_of_a_reference_in_torch(
    parts: Mapping[str, Any], own: Sequence[str], stages: Sequence[tuple[int, Sequence[str]]]
):
    setup = made(parts=parts)
    found, (shared, kept) = end(setup), reference(setup, own, stages)
    for name in (*BODY, *HEAD, *STATISTICS):
        if name in own:
            for client in range(setup.num_clients):
                assert_close(found[f"state {client}/kept parts/{name}"], kept[client][name], f"{client}/{name}")
        else:
            table = "mean buffers" if name in STATISTICS else "params"
            assert_close(found[f"server/{table}/{name}"], shared[name], name)


def test_whole_numbers_are_kept_and_never_averaged():
    averaged, personal = end(made()), end(made(parts={"buffers": "personal"}))
    assert not any("num_batches_tracked" in place for place in averaged)
    assert personal["state 0/kept parts/norm.num_batches_tracked"] == 4
    assert not any(place.startswith("server/mean buffers") for place in personal)


def test_only_shared_parts_are_billed():
    for parts, bits in [
        ({"personal": ["head"], "buffers": "personal"}, 32 * NUM_SHARED),
        ({"personal": ["head"], "buffers": "frozen"}, 32 * NUM_SHARED),
        ({"personal": ["head"]}, 32 * (NUM_SHARED + 24)),
        ({}, 32 * (NUM_SHARED + 24 + 130)),
    ]:
        record = play(made(parts=parts, rounds=1))[0][0]
        assert {row.downlink_bits for row in record.clients} == {bits}
        # The number of examples, in 64 bits.
        assert {row.uplink_bits for row in record.clients} == {bits + 64}


def test_buffers_are_not_compressed():
    uplink = {"name": "topk", "keep_ratio": 0.1}
    average, personal = (
        play(made(parts={"buffers": buffers}, uplink=uplink, rounds=1))[0][0].row.uplink_bits
        for buffers in ("average", "personal")
    )
    assert average - personal == 3 * 32 * 24


def test_frozen_buffers_are_those_of_the_start_for_every_method():
    setup = made(parts={"buffers": "frozen"}, method={"name": "ditto", "lr": LR})
    found = end(setup)
    assert not any("running" in place for place in found)
    assert setup.method.task.constants["norm.running_mean"].tolist() == [0.0] * 12


@pytest.mark.parametrize(
    ("finetune", "tuned"), [("all", (*BODY, *HEAD)), ("personal", HEAD), ("shared", BODY)], ids=["all", "head", "body"]
)
def test_the_head_of_fedbabu_is_the_first_one_until_it_is_fine_tuned(
    finetune: str, tuned: Sequence[str], tmp_path: Path
):
    parts = {"personal": ["head"], "order": "shared-only", "finetune": finetune}
    setup = made(parts={**parts, "finetune": "all"}, rounds=3)
    start, found = first_module(setup), end(setup)
    assert not any(place.startswith("state") for place in found)
    assert setup.evaluation.pooled
    method = {"name": "fedavg_ft", "lr": LR, "ft_epochs": 2}
    results = run(tmp_path / "run", parts=parts, method=method)
    shared = load_file(tmp_path / "run" / "models" / "global.safetensors")
    own = results.personal_model(0).network
    assert tuple(name for name in (*BODY, *HEAD) if not torch.equal(shared[name], own.get_parameter(name))) == tuned
    for name in HEAD:
        assert torch.equal(shared[name], start.get_parameter(name))


def test_an_absent_client_keeps_its_parts():
    setup = made(parts={"personal": ["head"]}, clients={"count": 3, "per_round": 1}, rounds=3)
    records, states = play(setup)
    before = contents(InlineExecutor(setup), states[0])
    for record, state in zip(records[1:], states[1:], strict=True):
        after, (here,) = contents(InlineExecutor(setup), state), (row.client for row in record.clients)
        for place, array in before.items():
            if place.startswith("state") and not place.startswith(f"state {here}/"):
                assert np.array_equal(array, after[place])
        before = after


@pytest.mark.parametrize("parts", [{}, {"personal": ["head"]}, {"buffers": "personal"}])
def test_unseen_clients_train_parts_of_their_own(parts: Mapping[str, Any]):
    def make(**options: Any) -> Setup:
        engine, given = options.pop("engine", "loop"), options.pop("clients", {})
        return made(**{"parts": parts, "runtime": {"engine": engine}, "clients": {"count": 6, **given}, **options})

    contracts.unseen_clients_are_evaluated_and_leave_no_trace(make)
    for name in ("scaffold", "fedprox", "fedopt"):
        play(make(method={"name": name, "lr": LR}, clients={"unseen": 0.3}, rounds=2))
    assert make().method.capabilities.newcomer == ("round" if parts else "model")
    tuned = make(method={"name": "fedavg_ft", "lr": LR})
    assert tuned.method.capabilities.newcomer == "model"


def test_a_model_that_nobody_has_is_evaluated_nowhere():
    setup = made(
        parts={"personal": ["head"]},
        clients={"count": 6, "unseen": 0.3},
        evaluation={"train": True, "personal_on_pooled": True},
        rounds=1,
    )
    ((record,), _) = play(setup)
    places = {name.partition("/")[0] for name in record.means if name.endswith("/accuracy")}
    assert {"own", "own_train", "personal_pooled", "unseen"} <= places
    assert not {"pooled", "pooled_train", "unseen_before_adapting"} & places


def test_peers_mix_their_statistics():
    setup = made(method={**METHOD, "name": "dpsgd"}, topology="fully-connected", rounds=1)
    found, means = end(setup), []
    for client in range(3):
        module = first_module(setup)
        train(module, setup, client, [(2, (*BODY, *HEAD))])
        means.append(module.get_buffer("norm.running_mean"))
    for client in range(3):
        assert_close(found[f"state {client}/kept parts/norm.running_mean"], torch.stack(means).mean(dim=0), str(client))


def test_a_stage_without_a_rate_moves_nothing_that_clients_keep():
    setup = made(method={"name": "scaffold", "option": "I", "lr": LR}, parts={"personal": ["head"]})
    method, batch = setup.method, setup.data(0).all("train")
    context = setup.context(0, setup.plan(0), 0, "client")
    server = setup.server_half.init_server(setup.initial)
    carry = method.begin(setup.first_state(0), downlinks.broadcast(setup, server, {}, context)[0], context)
    control = method.step(carry, batch, stage=Stage("control"))
    assert control["kept parts"] is carry["kept parts"] and control["gradient"] is not carry["gradient"]


def test_the_norm_of_each_part_is_clipped():
    method = {**METHOD, "momentum": 0.0, "clip_norm": 0.01, "steps": 1}
    setup = made(method=method, parts={"personal": ["head"]}, rounds=1)
    start, found = first_module(setup), end(setup)
    moved = [found[f"state 0/kept parts/{name}"] - start.get_parameter(name).detach().numpy() for name in HEAD]
    assert np.sqrt(sum((part**2).sum() for part in moved)) == pytest.approx(LR * 0.01, rel=1e-3)


def run(directory: Path, **tables: Any) -> Any:
    settings = {
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 1.0},
        "clients": {"count": 3},
        "model": Normed,
        "method": METHOD,
        "rounds": 2,
        "runtime": {"executor": "inline"},
        "output": {"report": False},
        "progress": False,
    }
    return rayfl.run(directory=directory, **{**settings, **tables})


def test_saved_models_have_both_parts_and_predict(tmp_path: Path):
    results = run(tmp_path / "run", parts={"personal": ["head"], "buffers": "personal"})
    setup, inputs = made(parts={"personal": ["head"], "buffers": "personal"}), np.full((1, 1, 8, 8), 7, np.uint8)
    found = end(setup)
    for client in range(3):
        module = results.personal_model(client).network
        for name in (*HEAD, *STATISTICS):
            tensor = module.state_dict()[name].numpy()
            assert np.array_equal(tensor, found[f"state {client}/kept parts/{name}"])
        assert results.predict(inputs, client=client).shape == (1,)
    assert "own/accuracy" in results.frame and "pooled/accuracy" not in results.frame
    shared = results.model().network
    assert torch.equal(shared.get_parameter("head.weight"), first_module(setup).get_parameter("head.weight"))


def test_the_global_model_is_evaluated_by_averaged_statistics(tmp_path: Path):
    results = run(tmp_path / "run")
    setup = made()
    found, test = end(setup), setup.dataset.test
    module = results.model().network
    for name in STATISTICS:
        assert np.array_equal(module.state_dict()[name].numpy(), found[f"server/mean buffers/{name}"])
    right = results.predict(test.inputs) == test.labels
    assert results.frame["pooled/accuracy"].iloc[-1] == pytest.approx(right.mean())


class Doubled(FedAvg):
    """Says that it takes one gradient a step, and takes two."""

    paper = "none"
    capabilities = Capabilities(keeps_parts=True)

    def step(self, carry: LocalCarry, batch: Batch, *, stage: Stage) -> LocalCarry:
        self.task.grad(carry["params"], batch)
        return super().step(carry, batch, stage=stage)


def test_a_method_that_takes_two_gradients_is_named():
    with refused(names=["Doubled", "2 gradients", "keeps_parts"], error=Exception):
        play(made(method={**METHOD, "name": Doubled}))


class Failing(FedAvg):
    """A method with a mistake."""

    paper = "none"
    capabilities = Capabilities(keeps_parts=True)

    def finish(self, *given: Any) -> Any:
        return 1 / 0


def test_a_mistake_inside_is_not_the_wrappers():
    with refused(names=["Failing.finish", "test_own_parts.py", "ZeroDivisionError"], error=Exception):
        play(made(method={**METHOD, "name": Failing}))


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ({"parts": {"buffers": "personal"}, "model": "logistic"}, ["parts.buffers", "'personal'", "logistic"]),
        ({"parts": {"order": "local-first"}}, ["parts.order", "personal"]),
        ({"parts": {"personal": ["head"], "personal_epochs": 2}}, ["parts.personal_epochs", "order"]),
        (
            {"parts": {"personal": ["head"], "order": "local-first", "personal_epochs": 2, "personal_steps": 1}},
            ["parts.personal_epochs", "personal_steps=1"],
        ),
        ({"parts": {"personal": ["head"], "finetune": "personal"}}, ["parts.finetune", "'personal'", "fedavg_ft"]),
        ({"parts": {"finetune": "shared"}}, ["parts.finetune", "personal=[]"]),
        ({"parts": {"personal": ["heads"]}}, ["parts.personal", "'heads'", "did you mean 'head'"]),
        ({"parts": {"buffer": "average"}}, ["parts.buffer", "did you mean 'buffers'"]),
    ],
)
def test_parts_that_do_nothing_are_refused(tables: Mapping[str, Any], names: list[str]):
    with refused(names=names):
        made(**tables)


PROGRAM = """
from rayfl.determinism.process import prepare_process
prepare_process()
from tests.methods.shared.test_own_parts import end, made

kept = end(made(model={"name": "mlp", "hidden": [8, 8, 8, 8]}, parts={"personal": ["*weight"]},
                method={"name": "fedavg", "lr": 0.5, "clip_norm": 0.01, "steps": 3}, rounds=3))
print({name: array.tobytes().hex() for name, array in kept.items()})
"""


def test_personal_parameters_are_clipped_alike_in_every_process():
    """A norm over several parameters depends on their order, which a set of words has anew in each process."""
    found = set[str]()
    for hashes in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        command = [sys.executable, "-c", PROGRAM]
        found.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert len(found) == 1
