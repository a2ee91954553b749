"""What every method holds whose clients keep parts of a model: the same numbers, and nothing personal in a message."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rayfl.methods.base import ServerHalf
from rayfl.methods.shared.own_parts import OwnPartsOfClients, OwnPartsOfPeers, Parts
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing import contracts
from rayfl.testing.executors import assert_same_bits, contents, play, rows
from tests.contracts.every_method import REGISTERED, Case, cases, played
from tests.refusals import refused

KEEPING = [case for case in REGISTERED if case.kind.capabilities.keeps_parts]
SHARING = [case for case in KEEPING if case.kind.gather and case.name != "dpsgd_ft"]

PARTS: Mapping[str, Mapping[str, object]] = {
    "FedPer": {"personal": ["head"]},
    "FedRep": {"personal": ["head"], "order": "local-first", "personal_steps": 2},
    "FedBN": {"personal": ["BatchNorm1d"], "buffers": "personal"},
}


def test_methods_keep_parts():
    assert {"fedavg", "scaffold", "fedpse", "dpsgd", "local"} <= {case.name for case in KEEPING}
    assert not {"ditto", "pfedme", "perfedavg", "fedfomo", "stem"} & {case.name for case in KEEPING}


def test_the_page_names_the_methods_that_keep_parts():
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "parts.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"with one gradient per step:(.*?), and elastic", page, flags=re.DOTALL)
    named = re.findall(r"`(\w+)`", listed)
    assert sorted(named) == sorted(case.name for case in KEEPING if case.kind.gather)


@cases(SHARING)
def test_parts_stay_with_their_clients(case: Case, tmp_path: Path):
    # In turn, so that each way meets servers and peers; test_own_parts.py compares all of them with plain torch.
    parts = list(PARTS.values())[SHARING.index(case) % len(PARTS)]
    contracts.parts_stay_with_their_clients(case.make, parts, case.num_clients, tmp_path)


@cases([case for case in SHARING if case.name == "fedavg"])
@pytest.mark.parametrize("name", PARTS)
def test_every_way_of_keeping_parts(case: Case, name: str, tmp_path: Path):
    contracts.parts_stay_with_their_clients(case.make, PARTS[name], case.num_clients, tmp_path)


@cases([case for case in KEEPING if not case.kind.gather])
def test_clients_that_send_nothing_keep_their_buffers(case: Case, tmp_path: Path):
    contracts.parts_stay_with_their_clients(case.make, {}, case.num_clients, tmp_path)
    with refused(names=["parts.personal", case.name, "nothing"]):
        case.make(model=contracts.Normed, parts={"personal": ["head"]})


def test_peers_that_are_evaluated_by_the_mean_of_whole_models_keep_no_parts(tmp_path: Path):
    (case,) = [case for case in KEEPING if case.name == "dpsgd_ft"]
    with refused(names=["DPSGDFT", "ft_from='own'"]):
        case.make(parts={"personal": ["3"]})
    method = {"name": "dpsgd_ft", "ft_from": "own", "lr": 0.05}
    contracts.parts_stay_with_their_clients(
        lambda **options: case.make(method=method, **options), PARTS["FedPer"], case.num_clients, tmp_path
    )


@cases([case for case in KEEPING if case.name != "dpsgd_ft"])
def test_without_parts_the_wrapper_changes_no_bit(case: Case):
    plain, records, run_states = played(case)
    kind = OwnPartsOfClients if issubclass(case.kind, ServerHalf) else OwnPartsOfPeers
    wrapped = replace(plain, method=kind(plain.method, Parts()))
    others, other_worlds = play(wrapped)
    assert rows(records) == rows(others)
    assert_same_bits(
        contents(InlineExecutor(plain), run_states[-1]), contents(InlineExecutor(wrapped), other_worlds[-1])
    )


# PFNM takes no model with other layers.
@cases([case for case in REGISTERED if not case.kind.capabilities.keeps_parts and case.name != "pfnm"])
def test_other_methods_are_refused_by_name(case: Case):
    with refused(names=[case.name, "parts.personal"]):
        case.make(parts={"personal": ["3"]})
    with refused(names=[case.name, "BatchNorm", "frozen"]):
        case.make(model=contracts.Normed)
