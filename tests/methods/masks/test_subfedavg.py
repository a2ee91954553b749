"""Sub-FedAvg against its equations in float64: two candidate masks, three gates, the mean over who holds an entry."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.data.batches import Batch, schedule
from rayfl.determinism import seeding
from rayfl.methods.base import Carry, Stage
from rayfl.methods.masks.subfedavg import SubFedAvg
from rayfl.methods.shared.accuracy_gate import GATE
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.evaluate_round import personal_models
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from tests.methods.reference import SIZES, Vectors, initial, played, setup_of, softmax_gradient
from tests.population.statuses import with_status
from tests.refusals import refused

ROUNDS, RATIO = 7, 0.2
HYPER = {"lr": 0.4, "epochs": 3, "batch_size": 4, "momentum": 0.5, "weight_decay": 0.01, "prune_ratio": RATIO}


def setup(clients: dict[str, Any] | None = None, engine: str = "loop", **hyper: Any) -> Setup:
    """Softmax regression; a third of every client's examples is its validation split."""
    made = setup_of("subfedavg", {**HYPER, **hyper}, clients=clients, rounds=ROUNDS)
    dealt = made.partition.hold_out(1 / 3, 0.0, np.random.default_rng(0))
    return replace(made, partition=dealt, engine_name=engine)


def accuracy(setup: Setup, params: Vectors, client: int) -> float:
    rows, examples = setup.partition.validation[client], setup.dataset.train
    logits = examples.inputs[rows] @ params["1.weight"].T + params["1.bias"]
    return float((logits.argmax(axis=1) == examples.labels[rows]).mean())


def without_smallest(weight: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return mask & (np.abs(weight) >= np.quantile(np.abs(weight[mask]), RATIO))


def trained(
    setup: Setup, round: int, client: int, params: Vectors, mask: np.ndarray
) -> tuple[Vectors, np.ndarray, np.ndarray]:
    """The weights after all epochs, and the candidates after the first one and the last one."""
    examples, velocity, candidates = setup.dataset.train, dict.fromkeys(params, 0.0), []
    mine = setup.partition.train[client]
    for stage, epochs in (("first epoch", 1), ("train", 2)):
        generator = seeding.generator(setup.seed, round, client, f"train/{stage}/batches")
        for rows in schedule(len(mine), epochs=epochs, steps=None, batch_size=4, generator=generator):
            inputs, labels = examples.inputs[mine[rows]].astype(np.float64), examples.labels[mine[rows]]
            gradient = softmax_gradient(params, inputs, labels)
            velocity = {name: 0.5 * velocity[name] + gradient[name] + 0.01 * params[name] for name in params}
            params = {name: value - 0.4 * velocity[name] for name, value in params.items()}
            params["1.weight"] = params["1.weight"] * mask
        candidates.append(without_smallest(params["1.weight"], mask))
    return params, *candidates


def bits(kept: int, changed: bool) -> int:
    """4 bytes for each of 3 biases and the kept weights; for a mask that has changed the positions of those that are
    left of 18 and a label: a bitmap takes 3 bytes, gaps one a position."""
    return 32 * (3 + kept) + 8 * (min(3, kept) + 1) * changed


@pytest.mark.parametrize(
    ("clients", "hyper", "target", "only"),
    [
        (
            {"per_round": 5},
            {"min_accuracy": 0.2, "min_distance": 0.12},
            [0.6] * 5,
            {(False, True, True), (True, True, False)},
        ),
        (
            {"retention_ratio": [0.3, 0.5, 0.9], "per_round": 4, "dropout_after_training": 0.3},
            {"min_accuracy": 0.3, "min_distance": 1e-4},
            [0.3, 0.5, 0.9] * 2,
            {(True, False, False), (False, True, True)},
        ),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_equals_the_equations(
    clients: dict[str, Any], hyper: dict[str, Any], target: list[float], only: set[tuple[bool, ...]], engine: str
):
    here = setup(clients, engine, **hyper)
    x, gates = initial(here), set()
    masks = [np.ones_like(x["1.weight"], dtype=bool) for _ in SIZES]
    executor = InlineExecutor(here)
    for round, (record, run_state) in enumerate(played(here)):
        ends: dict[int, Vectors] = {}
        down = {i: bits(int(mask.sum()), changed=False) for i, mask in enumerate(masks)}
        changed = {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            begun = {"1.weight": x["1.weight"] * masks[i], "1.bias": x["1.bias"]}
            end, early, late = trained(here, round, i, begun, masks[i])
            slim = {**end, "1.weight": end["1.weight"] * late}
            gate = (
                (early != late).mean() > hyper["min_distance"],
                masks[i].mean() > target[i],
                accuracy(here, slim, i) > hyper["min_accuracy"],
            )
            gates.add(tuple(map(bool, gate)))
            changed[i] = all(gate)
            if all(gate):
                masks[i], end = late, slim
            ends[i] = end
        if ends:
            held = np.sum([masks[i] for i in ends], axis=0)
            total = np.sum([end["1.weight"] for end in ends.values()], axis=0)
            weight = np.where(held > 0, total / np.maximum(held, 1), x["1.weight"])
            x = {"1.weight": weight, "1.bias": np.mean([end["1.bias"] for end in ends.values()], axis=0)}
        for name, value in x.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-4, atol=1e-5)
        for i, end in ends.items():
            state = tree.to_tensors(executor.get(run_state.states[i]))
            assert np.array_equal(state["mask"]["1.weight"].numpy(), masks[i]) and bool(state["mask"]["1.bias"].all())
            np.testing.assert_allclose(state["params"]["1.weight"].numpy(), end["1.weight"], rtol=1e-4, atol=1e-5)
        sent = {row.client: row.uplink_bits for row in record.clients if row.status == "delivered"}
        assert sent == {i: bits(int(masks[i].sum()), changed[i]) for i in ends}
        assert all(row.downlink_bits == down[row.client] for row in record.clients if row.downlink_bits)
    # It prunes, and each of distance, density and accuracy has shut the gate in one of the two cases.
    assert (True, True, True) in gates and only <= gates
    assert any(mask.mean() < 0.8 for mask in masks)


def candidate(here: Setup, **parts: Any) -> Carry:
    """A carry at the gate of client 0: both candidates lack the first weight, and the later one the second too."""
    state = here.first_state(0)
    packets = here.server_half.personal_message(
        here.server_half.init_server(here.initial), here.first_server_memory(0), here.context(0, here.plan(0), 0, "x")
    )
    carry = here.method.begin(state, packets.message, here.context(0, here.plan(0), 0, "client"))
    early, late = ({name: mask.clone() for name, mask in carry["mask"].items()} for _ in range(2))
    early["1.weight"][0, 0] = late["1.weight"][0, 0] = late["1.weight"][0, 1] = False
    counts = {"correct": torch.tensor(3.0), "evaluated": torch.tensor(4.0)}
    return {**carry, "early": early, "late": late, **counts, **parts}


def test_every_part_of_the_gate_is_strict():
    # One of 18 weights differs; the density is 1; the accuracy 3/4.
    open_gate: dict[str, Any] = {"min_distance": 0.05, "min_accuracy": 0.7, "target_density": 0.9}
    method = setup(**open_gate).method
    assert isinstance(method, SubFedAvg) and method.prunes(candidate(setup(**open_gate)))
    for shut in ({"min_distance": 1 / 18}, {"min_accuracy": 0.75}, {"target_density": 1.0}):
        here = setup(**{**open_gate, **shut})
        assert isinstance(here.method, SubFedAvg) and not here.method.prunes(candidate(here))
        assert here.method.end_stage(carry := candidate(here), stage=Stage("gate")) is carry


def test_the_gate_counts_what_the_pruned_model_gets_right():
    # Both examples excite a weight of class 0 that the later candidate lacks: without it the bias says class 2.
    here = setup()
    weight, bias = torch.zeros(3, 6), torch.tensor([0.0, 0.0, 1.0])
    weight[0, :2] = 10.0
    carry = candidate(here, params={"1.weight": weight, "1.bias": bias}, correct=torch.tensor(1.0))
    batch = Batch(torch.eye(6)[:2], torch.tensor([2, 2]))
    counted = here.method.step(carry, batch, stage=Stage(GATE, split="validation"))
    assert (float(counted["correct"]), float(counted["evaluated"])) == (1 + 2, 4 + 2)


def test_what_a_client_is_evaluated_by():
    here = setup(min_accuracy=0.0)
    run_state = played(here)[-1][1]
    state = tree.to_tensors(InlineExecutor(here).get(run_state.states[2]))
    kept, model = state["mask"]["1.weight"], run_state.server["params"]
    assert 0 < int(kept.sum()) < 18
    evaluated = here.method.eval_begin(state, model, None, here.context(0, here.plan(0), 2, "judge"))["params"]
    assert torch.equal(evaluated["1.weight"], torch.where(kept, model["1.weight"], 0.0))
    assert torch.equal(evaluated["1.bias"], model["1.bias"])
    saved = dict(personal_models(here, InlineExecutor(here), run_state))[2]
    assert torch.equal(saved["1.weight"] != 0, kept)


def test_settings():
    hyper = SubFedAvg().hyper.model_dump()
    assert [hyper[key] for key in ("lr", "momentum", "batch_size", "prune_ratio")] == [0.01, 0.5, 10, 0.1]
    assert [hyper[key] for key in ("min_distance", "min_accuracy")] == [1e-4, 0.5]
    stages = SubFedAvg().plan(0, 0.0).stages
    assert [(stage.name, stage.epochs, stage.split) for stage in stages] == [
        ("first epoch", 1, "train"),
        ("train", 4, "train"),
        ("gate", 1, "validation"),
    ]
    assert [stage.name for stage in SubFedAvg(epochs=1).plan(0, 0.0).stages] == ["first epoch", "gate"]
    with refused(names=["steps=3", "epochs"]):
        SubFedAvg(steps=3)
    # Without validation examples a run does not begin.
    with refused(names=["SubFedAvg", "validation", "splits.validation_ratio"]):
        check_setup(setup_of("subfedavg", {}))
