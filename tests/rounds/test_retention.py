"""Retention ratios: each client's own share on the wire, or one sentence that refuses them."""

from typing import Any

import numpy as np
import pytest

from rayfl.choices.kinds import find, named
from rayfl.compress.base import Compressor
from rayfl.compress.compose import Compose
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.lossless import Lossless
from rayfl.compress.random import RandK
from rayfl.compress.sparse import TopK, kept_entries
from rayfl.compress.structured import Structured
from rayfl.compress.ternary import Ternary
from rayfl.methods.base import Method
from rayfl.methods.compressed.fedscr import FedSCR
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.testing.watching import watched
from rayfl.topology.graphs import Ring
from rayfl.wrappers.elastic import Elastic
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.refusals import refused

RATIOS = [0.2, 0.5, 1.0]
TENSORS = {"weight": 8, "bias": 2}


def made(name: str, uplink: Compressor | None = None, **options: Any) -> Setup:
    kind = find(Method, name)
    clients = {"retention_ratio": RATIOS}
    return setup(kind(Quadratic(), kind.Hyper(**options)), rounds=2, clients=clients, uplink=uplink)


def sent(here: Setup, name: str, tensor: str) -> dict[int, int]:
    """By client the values that its messages have of a tensor, the same in every round."""
    here, log = watched(here)
    play(here)
    sizes = {(round, client): up[name].parts[f"{tensor}.values"].size for (round, client), up in log.up.items()}
    found = {client: size for (_, client), size in sizes.items()}
    assert sizes == {key: found[key[1]] for key in sizes}
    return found


@pytest.mark.parametrize(
    "uplink", [TopK(keep_ratio=0.9), RandK(keep_ratio=0.9), ErrorFeedback(inner=TopK(keep_ratio=0.9))], ids=repr
)
def test_an_uplink_takes_each_clients_own_share(uplink: Compressor):
    # Ratios are dealt out in turn: clients 0 and 3 have 0.2, so 2 of 8 and 1 of 2 entries.
    here = made("fedavg", uplink)
    assert sent(here, "delta", "weight") == {0: 2, 1: 4, 2: 8, 3: 2}
    assert sent(here, "delta", "bias") == {0: 1, 1: 1, 2: 2, 3: 1}
    # The server's own encoding keeps the uplink as it is.
    assert here.context(0, here.plan(0), -1, "server").uplink == uplink


def test_peers_do_so_too():
    kind = find(Method, "dpsgd")
    here = setup(
        kind(Quadratic(), kind.Hyper()),
        rounds=2,
        clients={"retention_ratio": RATIOS},
        topology=Ring(),
        uplink=TopK(keep_ratio=0.9),
    )
    assert sent(here, "change", "weight") == {0: 2, 1: 4, 2: 8, 3: 2}


def test_every_compressor_with_a_share_gives_it_away():
    shares = {
        "topk": TopK(keep_ratio=0.3),
        "randk": RandK(keep_ratio=0.3),
        "stc": Ternary(keep_ratio=0.3),
        "structured": Structured(keep_ratio=0.3),
    }
    for compressor in shares.values():
        assert compressor.keeping(0.3) == compressor
    assert ErrorFeedback(inner=Ternary()).keeping(0.3) == ErrorFeedback(inner=shares["stc"])
    assert Lossless(inner=Ternary()).keeping(0.3) == Lossless(inner=shares["stc"])
    assert Compose(outer=RandK()).keeping(0.3) == Compose(outer=shares["randk"])
    without = {name for name, kind in named(Compressor).items() if "keep_ratio" not in kind.model_fields}
    for name in without - {"feedback", "compose", "lossless"}:
        assert find(Compressor, name)().keeping(0.3) is None
    assert Structured(threshold=0.2).keeping(0.3) is None and ErrorFeedback(inner=Dense()).keeping(0.3) is None


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_fedpse_sends_and_answers_with_k_i(scope: str):
    here, log = watched(made("fedpse", scope=scope))
    play(here)
    for (round, client), up in log.up.items():
        (down,) = [message for message in log.down[round, client] if message]
        for packet in (up["update"], down["update"]):
            counts = {name: packet.parts[f"{name}.values"].size for name in TENSORS}
            ratio = RATIOS[client % 3]
            if scope == "tensor":
                # Client 2 asks for all of G, of which no entry is 0: it has an uplink of every entry.
                assert counts == {name: kept_entries(size, ratio) for name, size in TENSORS.items()}
            else:
                assert sum(counts.values()) == kept_entries(10, ratio)


def test_fedstc_and_fedscr_take_a_clients_own_share():
    here, log = watched(made("fedstc"))
    play(here)
    for (_, client), up in log.up.items():
        for name, size in TENSORS.items():
            signs = int(up["update"].support()[name].sum())
            assert signs == kept_entries(size, RATIOS[client % 3])
    # Whole filters and channels of [2, 4]: half of it at most for a share of 0.2, all of it for 1.
    here, log = watched(made("fedscr"))
    play(here)
    sizes = {key: up["delta"].parts["weight.values"].size for key, up in log.up.items()}
    assert all(size == 8 if client == 2 else size <= 6 for (_, client), size in sizes.items())
    assert all(sizes[round, 0] <= 4 for round in range(2))


def test_what_uses_no_share_is_refused():
    with refused(names=["clients.retention_ratio", "FedAvg", "dense", "remove"]):
        made("fedavg")
    with refused(names=["clients.retention_ratio", "FedSCR", "dense"]):
        made("fedscr", threshold=0.3)
    with refused(names=["clients.retention_ratio", "DIANA", "uplink"]):
        made("diana", TopK(keep_ratio=0.5), alpha=0.5)


def test_methods_that_honour_them_are_known():
    honour = {name for name in named(Method) if find(Method, name)().capabilities.honours_retention}
    masked = {"dispfl", "lottery_dsgd", "mcepl", "ind_mask", "ind_weipru", "avr_weipru", "par_weipru"}
    assert honour >= masked | {"fedpse", "fedstc", "fedscr"}
    assert not honour & {"fedavg", "scaffold", "dpsgd", "dsgdprox", "local", "fedavg_ft", "diana"}
    assert Elastic(FedSCR(Quadratic())).capabilities.honours_retention
    assert np.isclose(kept_entries(8, 0.2), 2)
