"""The round loop: how rounds follow each other, what a round changes, and which round an error names."""

import pytest
import torch

from rayfl import tree
from rayfl.choices.kinds import named
from rayfl.errors import Diverged, HookError, MethodError, NotFinite, naming_round
from rayfl.gather import Aggregate
from rayfl.methods.base import Context, Metrics, State
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import COLLECTORS, first_run_state, play_round, server_round, simulate
from rayfl.rounds.setup import Setup
from rayfl.schedules.base import Schedule
from rayfl.testing.executors import assert_same_bits, contents, play
from tests.contracts.seams import quadratic
from tests.methods.reference import setup_of


def setup(method: type[FedAvg] = FedAvg, rounds: int = 3) -> Setup:
    return quadratic.setup(method, rounds=rounds, hyper={"lr": 0.05})


def test_a_run_ends_after_its_rounds_or_earlier_and_goes_on_where_it_ended():
    made = setup(rounds=4)
    executor = InlineExecutor(made)
    records, run_states = play(made, executor)
    assert [record.row.round for record in records] == [0, 1, 2, 3]
    assert [run_state.round for run_state in run_states] == [1, 2, 3, 4]
    first, (*_, half) = play(made, executor, rounds=2)
    rest, (*_, whole) = play(made, executor, half)
    assert [record.row.round for record in (*first, *rest)] == [0, 1, 2, 3]
    assert_same_bits(contents(executor, run_states[-1]), contents(executor, whole))
    assert simulate(made, executor, lambda record, run_state: pytest.fail("a round"), whole) is whole


def test_the_run_state_before_a_round_is_not_changed():
    made = setup()
    executor, before = InlineExecutor(made), first_run_state(made)
    kept = {name: leaf.clone() for name, leaf in tree.flatten(before.server).items()}
    after, record = play_round(made, executor, before)
    assert (before.round, after.round, record.row.round) == (0, 1, 0)
    assert all(torch.equal(leaf, kept[name]) for name, leaf in tree.flatten(before.server).items())
    assert any(not torch.equal(leaf, kept[name]) for name, leaf in tree.flatten(after.server).items())


class Fails(FedAvg):
    """Its server fails in its second update."""

    def server_update(
        self, server: State, received: dict[str, Aggregate], delivered: list[int], ctx: Context
    ) -> tuple[State, Metrics]:
        if ctx.round == 1:
            raise LookupError("no such entry")
        return super().server_update(server, received, delivered, ctx)


def test_a_server_s_hook_that_fails_is_named_with_its_round():
    with pytest.raises(MethodError, match=r"round 1: Fails\.server_update.*LookupError: no such entry"):
        play(setup(Fails))
    with pytest.raises(MethodError, match="round 7: wrong"), naming_round(7):
        raise HookError("wrong")
    with pytest.raises(Diverged, match="round 7: "), naming_round(7):
        raise NotFinite("the model is not finite")


@pytest.mark.parametrize(("method", "replies"), [("fedavg", False), ("fedpse", True)])
def test_only_a_server_that_replies_sends_replies(method: str, replies: bool):
    made = setup_of(method, {}, sizes=(4, 4, 4), rounds=1)
    round = server_round(made, InlineExecutor(made), first_run_state(made))
    assert all((result.reply_bits > 0) is replies for result in round.ledger.results.values())
    assert round.run_state.round == 0 and round.number == 0


def test_every_schedule_names_a_way_to_collect_messages():
    assert {kind.collects for kind in named(Schedule).values()} == {*COLLECTORS, "clocks"}
