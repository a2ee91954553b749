"""The contract of the method that --method names; see rayfl/testing/contracts.py."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rayfl.methods.base import Method
from rayfl.testing import contracts
from rayfl.testing.comparison import rows
from rayfl.testing.conftest import NUM_CLIENTS
from rayfl.testing.contracts import Make, Played
from rayfl.testing.executors import play
from rayfl.untyped import Anything

HOLDS: Mapping[str, Callable[[Make, Played, Path], Anything]] = {
    "loop_and_vmap_agree": lambda make, played, _: contracts.loop_and_vmap_agree(make(), make(engine="vmap"), played),
    "several_workers_give_the_bits_of_one": lambda make, played, _: contracts.several_workers_give_the_bits_of_one(
        make(), played
    ),
    "a_run_goes_on_from_its_checkpoint": lambda make, _, folder: contracts.a_run_goes_on_from_its_checkpoint(
        make, NUM_CLIENTS, folder
    ),
    "no_hook_modifies_what_it_was_given": lambda make, played, _: contracts.no_hook_modifies_what_it_was_given(
        make(), played
    ),
    "the_bill_is_the_size_of_the_buffers": lambda make, *_: contracts.the_bill_is_the_size_of_the_buffers(
        make, NUM_CLIENTS
    ),
    "unseen_clients_are_judged_and_leave_no_trace": lambda make, *_: (
        contracts.unseen_clients_are_judged_and_leave_no_trace(make)
    ),
}


@pytest.mark.parametrize("name", HOLDS)
def test_it_keeps_the_contract(make: Make, played: Played, tmp_path: Path, name: str) -> None:
    HOLDS[name](make, played, tmp_path)


def test_it_names_its_paper_and_describes_its_hyper_parameters(method: type[Method]) -> None:
    assert method.paper, "set `paper`, which `rayfl methods` shows"
    assert [name for name, field in method.Hyper.model_fields.items() if not field.description] == []


def test_twice_the_same(make: Make, played: Played) -> None:
    assert rows(play(make())[0]) == rows(played[0])


@pytest.mark.parametrize("order", ["joint", "local-first"])
def test_parts_stay_with_their_clients(method: type[Method], make: Make, tmp_path: Path, order: str) -> None:
    if not method.keeps_parts or not method.gather:
        pytest.skip("the method does not say keeps_parts=True")
    parts = {"personal": ["head"], "order": order, "buffers": "average"}
    contracts.parts_stay_with_their_clients(make, parts, NUM_CLIENTS, tmp_path)


def test_bits_fall_under_a_compressor(method: type[Method], make: Make) -> None:
    if method.own_compression:
        pytest.skip("the method fixes its own compressors")
    contracts.bits_fall_under_a_compressor(make)
