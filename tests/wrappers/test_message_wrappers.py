"""Clipping and attacks against numpy, and what every message wrapper sees and gets."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.determinism.seeding import LazyGenerator
from rayfl.errors import ClientError
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Context, Metrics, State, Tree
from rayfl.population.sampling import attackers
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.contracts import several_workers_give_the_bits_of_one
from rayfl.testing.executors import play
from rayfl.wrappers.attack import Attack
from rayfl.wrappers.base import MessageWrapper
from rayfl.wrappers.clip import Clip
from tests.contracts.every_method import experiment
from tests.refusals import refused
from tests.wrappers.every_wrapper import UNIFORM, Later, Recorder, flat, here


def context(client: int = 0, round: int = 0) -> Context:
    made = here("attack")
    return made.context(round, made.plan(round), client, "client")


def test_the_whole_message_is_clipped():
    trees = {"a": {"w": torch.tensor([3.0, 0.0])}, "b": {"w": torch.tensor([[0.0, 4.0]])}}
    sent, _, metrics = Clip(norm=2.0).client(trees, {}, {}, context())
    assert flat(sent).tolist() == pytest.approx([1.2, 0.0, 0.0, 1.6])
    assert metrics == {"clip/norm": 5.0, "clip/clipped": 1.0}
    sent, _, metrics = Clip(norm=5.0).client(trees, {}, {}, context())
    assert flat(sent).tolist() == [3.0, 0.0, 0.0, 4.0] and metrics["clip/clipped"] == 0.0


def test_the_quantile_is_that_of_the_paper():
    """Andrew et al.: C <- C exp(-rate (share within - quantile)), in numpy from the norms that clients had."""
    made = here({"name": "clip", "norm": 0.05, "quantile": 0.5, "rate": 0.5}, Later, rounds=6)
    records, _ = play(made)
    bound = 0.05
    for record in records:
        norms = [one.value or 0.0 for one in record.metrics if one.client is not None and one.name == "clip/norm"]
        assert len(norms) == 6 and record.means["clip/bound"] == pytest.approx(bound, rel=1e-6)
        sent = [trees for number, _, trees in Later.seen if number == record.row.round]
        arrived = [np.linalg.norm(flat({"delta": trees["delta"]})) for trees in sent]
        assert sorted(arrived) == pytest.approx(sorted(min(norm, bound) for norm in norms), rel=1e-5)
        bound *= math.exp(-0.5 * (np.mean([norm <= bound for norm in norms]) - 0.5))
    # A bound that is far too low grows until half of the clients are within.
    assert bound > 0.1


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "gaussian"])
def test_a_share_attacks(kind: str):
    made = here(Recorder, {"name": "attack", "kind": kind, "share": 0.3, "strength": 3.0}, Later, rounds=1, **UNIFORM)
    (record,), states = play(made)
    wrong = attackers(made.seed, 6, 0.3)
    assert len(wrong) == 2 and record.means["attack/share"] == pytest.approx(2 / 6)
    for (_, client, honest), (_, same, sent) in zip(Recorder.seen, Later.seen, strict=True):
        assert client == same
        if client not in wrong or kind != "gaussian":
            factor = {"scale": 3.0, "sign-flip": -3.0}[kind] if client in wrong else 1.0
            assert flat(sent) == pytest.approx(factor * flat(honest))
        else:
            assert flat(sent).std() == pytest.approx(3.0, rel=0.1)
            assert abs(np.corrcoef(flat(sent), flat(honest))[0, 1]) < 0.1
    moved = tree.vector(tree.sub(made.initial, dict(states[0].server["params"]))).numpy()
    assert moved == pytest.approx(np.mean([flat(sent) for _, _, sent in Later.seen], axis=0), rel=1e-3, abs=1e-5)


def test_the_list_is_the_order():
    scaled: Any = {"name": "attack", "kind": "scale", "share": 0.3, "strength": 10.0}
    play(here(scaled, {"name": "clip", "norm": 0.1}, Later, rounds=1))
    assert max(np.linalg.norm(flat(sent)) for _, _, sent in Later.seen) == pytest.approx(0.1, rel=1e-5)
    Later.seen.clear()
    play(here({"name": "clip", "norm": 0.1}, scaled, Later, rounds=1))
    assert max(np.linalg.norm(flat(sent)) for _, _, sent in Later.seen) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("uplink", ["dense", "topk"])
def test_what_scaffold_sends_is_what_its_clients_keep(uplink: str):
    """c stays the mean of the c_i, whatever wrappers and compressors do to the messages."""
    made = here("attack", {"name": "clip", "norm": 0.3}, method="scaffold", uplink=uplink)
    records, states = play(made)
    assert records[-1].means["clip/clipped"] > 0.5
    executor = InlineExecutor(made)
    own = [tree.to_tensors(executor.get(ref))["control_variate"] for ref in states[-1].states.values()]
    mean = np.mean([tree.vector(one).numpy() for one in own], axis=0)
    assert tree.vector(dict(states[-1].server["control_variate"])).numpy() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("method", ["diana", "adiana", "marina", "lag", "fedpd", "ef21", "doublesqueeze"])
def test_methods_that_encode_hand_over_their_trees(method: str):
    """What arrives is what the wrapper made: everybody sends zeros, and the server's model stays."""

    class Silenced(MessageWrapper):
        def client(
            self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
        ) -> tuple[Mapping[str, Tree], State, Metrics]:
            return {name: tree.zeros_like(one) for name, one in trees.items()}, state, {}

    made = here(Silenced, method=method, rounds=2)
    _, states = play(made)
    server = made.server_half.model(states[-1].server)
    assert tree.norm(tree.sub(server, made.initial)) < 1e-6


def test_peers_attack_their_neighbours():
    made = here(Recorder, "attack", Later, method="dpsgd", rounds=1)
    play(made)
    wrong = attackers(made.seed, 6, 0.2)
    for (_, client, honest), (_, _, sent) in zip(Recorder.seen, Later.seen, strict=True):
        assert flat(sent) == pytest.approx((-1.0 if client in wrong else 1.0) * flat(honest))


LINE = {"name": "grid", "rows": 1}
PAIRS = {"schedule": {"name": "gossip", "partners": 1}}


class Watched(Attack):
    """An attack that notes what attackers would have sent, and what they send."""

    seen: ClassVar[list[tuple[int, Mapping[str, Tree], Mapping[str, Tree]]]] = []

    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        sent, state, metrics = super().client(trees, state, received, ctx)
        self.seen.append((ctx.traits.id, trees, sent))
        return sent, state, metrics


@pytest.mark.parametrize(
    ("method", "others"),
    [
        ("sgp", {"topology": {"name": "ring", "weights": "column"}}),
        *((method, {"topology": "ring"}) for method in ("dsgt", "kgt", "led", "d2")),
        ("relaysgd", {"topology": LINE}),
        ("adpsgd", {"topology": "ring", **PAIRS}),
    ],
)
def test_attacks_reach_the_neighbours_alone_also_where_messages_are_made_late(method: str, others: dict[str, Any]):
    def played(*wrap: Any) -> tuple[Any, list[np.ndarray]]:
        made = prepare(experiment(method, wrap=[*wrap], rounds=1, **others))
        _, (state,) = play(made)
        models = (InlineExecutor(made).get(state.states[client])["params"] for client in range(6))
        return made, [np.concatenate([array.ravel() for array in model.values()]) for model in models]

    Watched.seen.clear()
    (made, attacked), (_, honest) = played(Watched(share=0.17, strength=3.0)), played()
    (attacker,) = attackers(made.seed, 6, 0.17)
    for client, true, sent in Watched.seen:
        if true:
            assert flat(sent) == pytest.approx((-3.0 if client == attacker else 1.0) * flat(true))
    assert {client for client, true, _ in Watched.seen if true} == {*range(6)}
    differ = {client for client in range(6) if not np.array_equal(attacked[client], honest[client])}
    if method == "adpsgd":
        assert attacker in differ
        return
    around = {int(peer) for peer in made.topology.sparse(6, made.seed, 0)[[attacker]].indices}
    # Who sends each neighbour a message of its own hears none of its own.
    assert differ == around | (set() if method == "relaysgd" else {attacker})


def test_noise_on_links_does_not_depend_on_workers():
    noise = {"name": "attack", "kind": "gaussian", "share": 0.3}
    several_workers_give_the_bits_of_one(here(noise, method="relaysgd", topology=LINE, rounds=2))


def test_packets_and_more_than_attacks_are_refused():
    with refused(names=["attack", "DisPFL", "encodes"]):
        here("attack", method="dispfl")
    with refused(names=["clip", "SGP", "encodes"]):
        here("clip", method="sgp", topology={"name": "ring", "weights": "column"})


def test_a_message_past_a_wrapper_that_must_see_all_is_refused():
    class Strict(MessageWrapper):
        sees_all: ClassVar[bool] = True

        def client(
            self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
        ) -> tuple[Mapping[str, Tree], State, Metrics]:
            return trees, state, {}

    with refused(names=["FedAvg", "num_examples", "Strict"], error=ClientError):
        play(here(Strict, rounds=1))
    with refused(names=["wrap", "Strict", "last"]):
        experiment("fedavg", wrap=[Strict, "clip"])
    with refused(names=["parts.buffers", "average", "personal"]):
        here(Strict, model="resnet18-batchnorm", data={"name": "digits"}, **UNIFORM)
    play(here(Strict, rounds=1, **UNIFORM))


def test_the_seed_of_a_context_is_the_experiments():
    assert isinstance(context().draws, LazyGenerator) and context().seed == 5
