"""Three clients whose speeds and bytes are known, for simulated faults by hand.

FedAvg on 21 parameters: 672 bits down; 672 and 64 more for the number of examples up, 736. The clients have 8 examples
and do one epoch in batches of 4, so two steps.
"""

from typing import Any

import numpy as np
import pytest

from rayfl.population.client import ClientStatus
from rayfl.population.sampling import Population
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import ClientRow, RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import contents
from tests.methods.reference import played, setup_of

DOWN, UP = 672, 736
SIZES = (8, 8, 8)
SPEEDS = {"examples_per_s": [8.0, 4.0, 2.0], "uplink_mbps": UP * 1e-6, "downlink_mbps": DOWN * 1e-6}
"""One second for a download and one for an upload; 1, 2 and 4 seconds of work: back after 3, 4 and 6 seconds."""


def three(method: str = "fedavg", rounds: int = 1, **clients: Any) -> Setup:
    return setup_of(method, {"batch_size": 4}, sizes=SIZES, clients={**SPEEDS, **clients}, rounds=rounds)


def one_round(setup: Setup) -> tuple[RoundRecord, RunState]:
    ((record, run_state),) = played(setup)
    return record, run_state


def fated(monkeypatch: pytest.MonkeyPatch, *statuses: str) -> None:
    """What the seed would decide."""
    monkeypatch.setattr(
        Population,
        "drawn_statuses",
        lambda self, round, clients: {client: ClientStatus(statuses[client]) for client in clients},
    )


def row(record: RoundRecord, client: int) -> ClientRow:
    (found,) = [row for row in record.clients if row.client == client]
    return found


# Any: rows are typed, and what pytest compares with is no float.
def near(seconds: float) -> Any:
    return pytest.approx(seconds)


def end(setup: Setup) -> dict[str, np.ndarray]:
    """All that a run leaves behind: the server's state, the clients' and its memories of them."""
    return contents(InlineExecutor(setup), played(setup)[-1][1])
