"""Schedules: updates as in an event-driven reference, any number of workers, checkpoints, bills, refusals."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.single import run
from rayfl.choices.kinds import find, named
from rayfl.experiment.prepare import prepare
from rayfl.methods.server.fedavg import FedAvg
from rayfl.report.figures import sections
from rayfl.report.groups import group_runs
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.run_directory.record import read_run
from rayfl.schedules.asynchronous import Asynchronous, Buffered
from rayfl.schedules.base import AT_ONCE, NOT_YET, Now, Schedule
from rayfl.schedules.synchronous import SemiSynchronous
from rayfl.selections.base import Seen, Selection, State
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, leaves, play, rows
from tests.contracts.every_method import experiment
from tests.contracts.seams import quadratic
from tests.contracts.seams.closed_form import flat, start
from tests.refusals import refused
from tests.schedules.reference import simulated, trained

EXAMPLE = f"{Path(__file__).resolve().parents[2]}/jobs/examples/number_or_time.py:NumberOrTime"
FLYING = sorted(name for name, kind in named(Schedule).items() if kind.collects == "flights")
SPEEDS: dict[str, Any] = {"examples_per_s": {"median": 20.0, "sigma": 1.2}, "uplink_mbps": 0.002, "per_round": 3}


def here(schedule: Any, method: str = "fedavg", **options: Any) -> Setup:
    clients = {"count": 6, **SPEEDS, **options.pop("clients", {})}
    return prepare(experiment(method, schedule=schedule, clients=clients, **{"rounds": 6, **options}))


def flown(record: RoundRecord) -> dict[int, dict[str, float]]:
    """What a record says of each flight, by client."""
    found: dict[int, dict[str, float]] = {}
    for client, name, value in record.metrics:
        if client is not None and name.startswith("flight/") and value is not None:
            found.setdefault(client, {})[name.removeprefix("flight/")] = value
    return found


PAPERS = (Buffered(buffer=2), Asynchronous(mixing=0.4))
TOGETHER = {"examples_per_s": [float(size) for size in quadratic.TRAIN], "per_round": 3}
"""Every client works for one second, so all that begin together are back at the same moment."""


# Any: arguments of the reference, and of `[clients]`.
@pytest.mark.parametrize(
    ("schedule", "reference", "clients"),
    [
        (PAPERS[0], {"buffer": 2}, SPEEDS),
        (PAPERS[0], {"buffer": 2}, {**SPEEDS, "per_round": 2}),
        (Buffered(buffer=1, staleness="hinge", hinge=1, slope=0.5), {"buffer": 1}, SPEEDS),
        (Buffered(buffer=3, staleness="constant"), {"buffer": 3}, SPEEDS),
        (Buffered(buffer=2), {"buffer": 2}, TOGETHER),
        (Buffered(buffer=1), {"buffer": 1}, TOGETHER),
        (PAPERS[1], {"buffer": 1, "mixes": True}, SPEEDS),
        (PAPERS[1], {"buffer": 1, "mixes": True}, TOGETHER),
        (SemiSynchronous(period_s=0.7), {"period": 0.7}, SPEEDS),
        # Every fifth update falls on a moment at which all are back.
        (
            SemiSynchronous(period_s=(1.0 + 10 * 32 / 50e6 + (10 * 32 + 64) / 10e6) / 5),
            {"period": 0.2 + 8.96e-6},
            TOGETHER,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "together" if value is TOGETHER else "",
)
def test_two_hundred_updates_are_those_of_the_reference(
    schedule: Schedule, reference: dict[str, Any], clients: dict[str, Any]
):
    method = FedAvg(quadratic.Quadratic(), FedAvg.Hyper(lr=0.05, batch_size=2))
    rounds = 200 if schedule in PAPERS else 50
    made = replace(quadratic.setup(method, rounds=rounds, clients=clients), schedule=schedule)

    def factor(staleness: int) -> float:
        if isinstance(schedule, Buffered) and schedule.staleness != "polynomial":
            return 1.0 if staleness <= 1 or schedule.staleness == "constant" else 1 / (0.5 * (staleness - 1) + 1)
        return (0.4 if isinstance(schedule, Asynchronous) else 1.0) / (1 + staleness) ** 0.5

    expected = simulated(made, factor, **reference)
    records, run_states = play(made)
    found = np.stack([flat(one.server["params"]) for one in run_states])
    np.testing.assert_allclose(found, np.stack([one.x for one in expected]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.cumsum([one.row.simulated_s for one in records]), [one.second for one in expected])
    stale = 0
    for number, (record, update) in enumerate(zip(records, expected, strict=True)):
        own = flown(record)
        assert sorted(own) == [client for client, *_ in update.messages] == [row.client for row in record.clients]
        for client, version, began, ended in update.messages:
            stale = max(stale, number - version)
            times = {"version": version, "staleness": number - version, "began_s": began, "ended_s": ended}
            assert own[client] == pytest.approx(times)
    assert stale > 0


class First(Selection):
    """The first of the available clients, so that who begins does not depend on numbers of flights and rounds."""

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        return available[:num_wanted].tolist()


@pytest.mark.parametrize("places", [2, 4])
def test_equal_clients_and_a_buffer_of_all_at_work_are_fedavg_round_by_round(places: int):
    # With full batches a client draws nothing, so the bits are the same.
    method = FedAvg(quadratic.Quadratic(), FedAvg.Hyper(lr=0.05, batch_size=0, epochs=2))
    clients = {**TOGETHER, "per_round": places}
    rounds = replace(quadratic.setup(method, rounds=6, clients=clients), selection=First())
    flights = replace(rounds, schedule=Buffered(buffer=places, staleness="constant"))
    (expected, states), (found, flown_states) = play(rounds), play(flights)
    for one, other in zip(states, flown_states, strict=True):
        assert_same_bits(leaves("server", one.server), leaves("server", other.server))
    for one, other in zip(expected, found, strict=True):
        assert one.clients == other.clients and {flight["staleness"] for flight in flown(other).values()} == {0.0}
        assert one.row.simulated_s == pytest.approx(other.row.simulated_s)


@pytest.mark.parametrize("mixes", [True, False])
def test_one_client_at_work_is_sequential(mixes: bool):
    """A client begins with the model that the one before it has left: x <- (1 - a) x + a y, and a = 1 for FedBuff."""
    schedule = Asynchronous(mixing=0.4) if mixes else Buffered(buffer=1)
    method = FedAvg(quadratic.Quadratic(), FedAvg.Hyper(lr=0.05, batch_size=2))
    made = replace(quadratic.setup(method, rounds=30, clients={**SPEEDS, "per_round": 1}), schedule=schedule)
    records, run_states = play(made)
    x = start(made)
    for number, (record, state) in enumerate(zip(records, run_states, strict=True)):
        ((client, flight),) = flown(record).items()
        share = 0.4 if mixes else 1.0
        x = (1 - share) * x + share * trained(made, number, client, x)
        assert (flight["staleness"], flight["version"]) == (0.0, number)
        np.testing.assert_allclose(flat(state.server["params"]), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("due", ["AT_ONCE", "now.second", "0.0", "NOT_YET if now.under_way == 3 else AT_ONCE"])
def test_no_schedule_closes_empty_updates_for_ever(due: str, tmp_path: Path):
    head = "from rayfl.schedules.base import AT_ONCE, NOT_YET, Schedule"
    (tmp_path / "mine.py").write_text(f"{head}\n\n\nclass Mine(Schedule):\n    def due(self, now): return {due}\n")
    records, _ = play(here(f"{tmp_path}/mine.py:Mine", clients={"upload_loss": 0.3}, rounds=12))
    # A schedule may wait for a second in which only lost messages end.
    assert all(record.row.delivered or (due == "now.second" and record.row.simulated_s) for record in records)
    assert {row.status for record in records for row in record.clients} == {"delivered", "upload_lost"}


def test_when_updates_are_due():
    now = Now(second=7.0, updated_s=5.0, version=2, under_way=3, arrived=2, places=4)
    assert Buffered().due(now) == Buffered(buffer=2).due(now) == AT_ONCE
    assert Buffered(buffer=3).due(now) == NOT_YET
    assert Asynchronous().due(now) == AT_ONCE and Asynchronous().due(replace(now, arrived=0)) == NOT_YET
    semi = SemiSynchronous(period_s=4.0)
    assert semi.due(now) == 9.0
    assert Buffered().begins(now) == 1 and semi.begins(now) == 0 and semi.begins(replace(now, second=5.0)) == 1


def test_factors_by_hand():
    assert Buffered(most_staleness=3).scale(3) == 0.5 and Buffered(most_staleness=3).scale(4) is None
    hinged = Asynchronous(mixing=0.8, staleness="hinge", slope=2.0, hinge=1)
    assert [hinged.scale(staleness) for staleness in (0, 1, 3)] == pytest.approx([0.8, 0.8, 0.8 / 5])


def test_a_factor_multiplies_the_message_and_not_its_weight():
    # In an update by one message a weight would cancel.
    method = FedAvg(quadratic.Quadratic(), FedAvg.Hyper(lr=0.05))
    halved, whole = Buffered(buffer=1, power=1.0), Buffered(buffer=1, staleness="constant")
    x, half, full = (
        [
            flat(one.server["params"])
            for one in play(replace(quadratic.setup(method, rounds=2, clients=SPEEDS), schedule=one))[1]
        ]
        for one in (whole, halved, whole)
    )
    np.testing.assert_allclose(half[1] - x[0], 0.5 * (full[1] - x[0]), atol=1e-6)


DROPOUTS = ("before_download", "after_download", "after_training")
CASES = [
    *((name, "fedavg", {}) for name in (*FLYING, EXAMPLE)),
    ("buffered", "fedpse", {}),
    ({"name": "buffered", "buffer": 2, "most_staleness": 1}, "fedpse", {"dropout_after_training": 0.2}),
    ("semi-synchronous", "ditto", {"deadline_s": 60.0, "dropout_before_download": 0.2, "upload_loss": 0.2}),
    ("buffered", "fedopt", {"availability": {"probability": 0.6}, "availability_s": 2.0}),
    *(({"name": "buffered", "buffer": 1}, "fedavg", {f"dropout_{when}": 0.4}) for when in DROPOUTS),
    ("asynchronous", "fedavg", {"dropout_before_download": 0.4, "examples_per_s": 100.0, "downlink_mbps": 0.002}),
]


@pytest.mark.parametrize(("schedule", "method", "clients"), CASES)
def test_every_schedule_under_the_engine(schedule: Any, method: str, clients: dict[str, Any], tmp_path: Path):
    """On one worker, on three, and from the checkpoints of all updates, with flights of several versions: the same."""
    made = here(schedule, method, clients=clients)
    records, run_states = play(made)
    again, later = play(made, Shuffled(made))
    assert rows(records) == rows(again)
    assert_same_bits(contents(InlineExecutor(made), run_states[-1]), contents(Shuffled(made), later[-1]))
    executor = InlineExecutor(made)
    versions = [{one.version for one in state.air.flights.values()} for state in run_states]
    assert max(map(len, versions)) > 1 or schedule == "semi-synchronous" or clients.get("examples_per_s")
    for at, state in enumerate(run_states[:-1]):
        checkpoint.save(tmp_path, state, executor)
        read_back = checkpoint.load(tmp_path, executor)
        assert read_back is not None
        assert_same_bits(contents(executor, state), contents(executor, read_back))
        rest, rest_states = play(made, run_state=read_back)
        assert rows(records[at + 1 :]) == rows(rest)
        assert_same_bits(contents(executor, run_states[-1]), contents(executor, rest_states[-1]))


@pytest.mark.parametrize("width", [2, None])
def test_stacks_have_the_bits_of_any_other_stacks(width: int | None, tmp_path: Path):
    """A run that is resumed after any update trains those under way in other stacks than before."""
    made = here({"name": "buffered", "buffer": 2}, runtime={"engine": "vmap", "stack_width": width})
    records, run_states = play(made)
    executor = InlineExecutor(made)
    assert made.work_width == width or (width is None and made.work_width == made.num_trainers)
    for index, state in enumerate(run_states[:-1]):
        checkpoint.save(tmp_path, state, executor)
        rest, _ = play(made, run_state=checkpoint.load(tmp_path, executor))
        assert rows(records[index + 1 :]) == rows(rest)


def test_faults_of_flights():
    faults = {"dropout_before_download": 0.2, "dropout_after_download": 0.2, "upload_loss": 0.2, "deadline_s": 30.0}
    schedule = {"name": "buffered", "buffer": 2, "most_staleness": 0}
    records, run_states = play(here(schedule, clients=faults, rounds=20))
    statuses = {row.status for record in records for row in record.clients}
    lost = {"dropped_before_download", "dropped_after_download", "upload_lost"}
    assert statuses == {"delivered", "stale", "late", *lost}
    for record in records:
        own = flown(record)
        for row in record.clients:
            if row.status in ("delivered", "stale"):
                assert (row.status == "stale") == (own[row.client]["staleness"] > 0) and row.uplink_bits
            took = own[row.client]["ended_s"] - own[row.client]["began_s"]
            assert took == pytest.approx(row.simulated_s, abs=1e-9) and took <= 30.0 + 1e-9
    assert run_states[-1].air.second == pytest.approx(sum(record.row.simulated_s for record in records))


def test_nobody_begins_twice_between_two_updates_or_before_the_reply():
    slow = {"downlink_mbps": 0.001, "per_round": 6}
    made = here({"name": "buffered", "buffer": 3}, "fedpse", clients=slow, rounds=8)
    records, run_states = play(made)
    last: dict[int, float] = {}
    waited = 0
    for record, state in zip(records, run_states, strict=True):
        for client, one in flown(record).items():
            waited += one["began_s"] == last.get(client)
            assert one["began_s"] >= last.get(client, 0.0)
            last[client] = one["ended_s"]
        assert state.air.busy_s
        # Clients that are under way have the states from before.
        assert set(state.states) == set(state.server_memories) == set(last)
        last |= state.air.busy_s
    # Replies take seconds, so some clients begin the moment that they have theirs.
    assert waited


def test_if_all_are_back_the_server_updates_with_fewer():
    (record,), _ = play(
        here({"name": "buffered", "buffer": 5}, clients={"dropout_after_training": 0.6, "per_round": 6}, rounds=1)
    )
    assert 0 < record.row.delivered < 5


@pytest.mark.parametrize("method", ["ditto", "fedavg"])
def test_who_drops_out_before_the_download_keeps_its_state(method: str):
    """Ditto's personal model, and FedAvg's memory of error feedback: both stay in the checkpoints of all updates."""
    feedback = {} if method == "ditto" else {"uplink": {"name": "feedback", "inner": "topk"}}
    made = here("buffered", method, clients={"dropout_before_download": 0.5}, rounds=12, **feedback)
    records, run_states = play(made)
    had = {row.client for record in records for row in record.clients if row.status == "delivered"}
    gone = {row.client for record in records for row in record.clients if row.status == "dropped_before_download"}
    assert had & gone and all(one is not None for state in run_states for one in state.states.values())
    assert had <= {*run_states[-1].states}


def test_an_empty_beginning_is_not_played_twice(tmp_path: Path):
    (tmp_path / "trace.csv").write_text("client,first_round,last_round\n" + "".join(f"{n},3,99\n" for n in range(6)))
    clients = {"availability": {"trace": f"{tmp_path}/trace.csv"}, "availability_s": 1.0}
    made = here({"name": "semi-synchronous", "period_s": 1.5}, clients=clients)
    executor = InlineExecutor(made)
    _, run_states = play(made, executor)
    assert run_states[1].air.second == 3.0 and not run_states[1].air.next_number
    checkpoint.save(tmp_path / "checkpoints", run_states[1], executor)
    found = checkpoint.load(tmp_path / "checkpoints", executor)
    assert found is not None and found.air == run_states[1].air


def test_nobody_is_available(tmp_path: Path):
    (tmp_path / "trace.csv").write_text("client,first_round,last_round\n0,0,1\n1,1,3\n")
    clients = {"availability": {"trace": str(tmp_path / "trace.csv")}, "availability_s": 1.0}
    records, run_states = play(here({"name": "buffered", "buffer": 1}, clients=clients, rounds=8))
    began = {int(one["began_s"]) for record in records for one in flown(record).values()}
    assert began <= {0, 1, 2, 3} and records[-1].row.delivered == 0 and run_states[-1].air.second > 4


def test_every_method_is_refused_or_runs():
    from rayfl.methods.base import Method, PeerHalf

    for name, kind in named(Method).items():
        if kind.capabilities.takes_stale and not issubclass(kind, PeerHalf):
            play(here("buffered", name, rounds=2, evaluation={"every": 0}))
        else:
            with refused(names=[kind.__name__] if issubclass(kind, PeerHalf) else ["schedule", kind.__name__]):
                here("buffered", name)


def test_what_a_schedule_cannot_be_used_with():
    with refused(names=["schedule", "asynchronous", "FedPSE", "difference"]):
        here("asynchronous", "fedpse")
    with refused(names=["schedule", "clients.take_first"]):
        here("buffered", clients={"take_first": 2})
    with refused(names=["schedule", "downlink"]):
        here("buffered", downlink="topk")
    with refused(names=["schedule", "power-of-choice", "polls"]):
        here("buffered", selection="power-of-choice")
    with refused(names=["schedule.buffer=7", "6 clients"]):
        here({"name": "buffered", "buffer": 7})
    for given in (
        {"schedule": "synchronous", "clients": {"availability": {"probability": 0.5}}},
        {"schedule": "buffered", "clients": {}},
    ):
        with refused(names=["clients.availability_s=5"]):
            here(given["schedule"], clients={"availability_s": 5.0, **given["clients"]})
    with refused(names=["schedule.hinge=3", "staleness='polynomial'"]):
        here({"name": "buffered", "hinge": 3})


def test_the_page_draws_staleness_and_idle_places(tmp_path: Path):
    table = experiment(
        "fedavg", schedule="buffered", clients={"count": 6, **SPEEDS}, output={"report": False}, rounds=6
    )
    folder = run(
        table.model_copy(update={"runtime": table.runtime.model_copy(update={"executor": "inline"})}), tmp_path
    )
    shown = sections(group_runs([read_run(folder)]), ["pooled/accuracy"])
    drawn = {figure.title: figure for section in shown for figure in section.figures}
    assert "Simulated time so far, s" in str(drawn["Staleness of messages"].chart)
    # No place is ever idle.
    assert drawn["Idle share"].caption.startswith("0 (0 to 1), the same at all times.")


def test_rounds_that_evaluate_evaluate_all_that_arrived():
    records, _ = play(here({"name": "buffered", "buffer": 2}, evaluation={"every": 2}))
    for record in records:
        evaluated = [client for client, name, _ in record.metrics if name == "own_after_training/accuracy"]
        arrived = [row.client for row in record.clients]
        assert evaluated == ([None, *arrived] if record.row.round % 2 or record.row.round == 5 else [])
        assert ("own/accuracy" in record.means) == bool(evaluated)
        assert 0.0 <= record.means["flight/idle_share"] <= 1.0


@pytest.mark.parametrize("name", [*named(Schedule), EXAMPLE])
def test_a_schedule_is_a_table_and_comes_back(name: str):
    made = experiment("fedavg", schedule={"name": name}, clients={"count": 6, "per_round": 2})
    assert type(made.schedule) is find(Schedule, name)
    assert type(made)(**made.as_dict()) == made


def test_a_copied_example_runs(tmp_path: Path):
    shutil.copy(EXAMPLE.partition(":")[0], tmp_path / "mine.py")
    records, _ = play(here({"name": f"{tmp_path}/mine.py:NumberOrTime", "patience_s": 0.1}, rounds=3))
    assert [record.row.delivered for record in records] != [3, 3, 3]
