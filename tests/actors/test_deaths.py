"""How many deaths a run bears: as many as it likes while it gets further, ten where it does not."""

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from actors import session
from actors.errors import DEATHS, ClusterError, Losses
from rayfl.prepare import prepare
from rayfl.record import RoundRow
from tests.actors.toys import experiment


def test_only_new_rounds_are_a_way_forward() -> None:
    losses = Losses()
    # Before any round, twice; after rounds 4, 3 (played again) and 4 (again); after round 5.
    assert [losses.add(reached) for reached in (-1, -1, 4, 3, 4, 5)] == [1, 2, 1, 2, 3, 1]


def test_a_round_that_was_reached_before_is_not_new() -> None:
    losses = Losses()
    assert [losses.add(reached) for reached in (9, 2, 7, 9)] == [1, 2, 3, 4]


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("forward", "lives"), [(0, DEATHS), (1, 25)])
def test_coordinators_that_die(forward: int, lives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed: list[bool] = []

    # Any: what session._play takes.
    def dying(setup: Any, order: Any, on_round: Any, *others: Any) -> bool:
        resumed.append(order.resumed)
        on_round(RoundRow(forward * len(resumed), 1, 1, 0, 0, 1.0, 0.1), {})
        if len(resumed) == 25:
            return True
        raise RayError("the actor died.\nSee its logs.")

    chosen = experiment(rounds=50)
    monkeypatch.setattr(session, "_play", dying)
    said: list[str] = []

    def play() -> bool:
        return session.play(chosen, prepare(chosen), tmp_path, lambda row, means: None, notice=said.append)

    if forward:
        assert play()
        assert {sentence.rpartition(", ")[2] for sentence in said} == {f"try 2 of {DEATHS}"}
    else:
        with pytest.raises(ClusterError) as raised:
            play()
        began = f"the coordinator died {DEATHS} times; go on with: rayfl resume {tmp_path} (the last time Ray said: "
        assert str(raised.value) == f"{began}the actor died. See its logs.)"
    assert resumed == [False] + [True] * (lives - 1)
