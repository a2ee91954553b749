"""What is done about every kind of loss, up to its bound and at it; no Ray needed."""

import subprocess
import sys

import pytest

from actors.errors import TRIES, Cause, ClusterError, Failure, Setbacks, try_again
from rayfl.errors import ClientError
from tests.actors.toys import logged
from tests.refusals import check_sentence, refused

CALL = "round 3, train, clients 4 to 7"
FACTS: dict[Cause, list[str]] = {
    "memory": ["rayfl resume DIR --actors N", "runtime.num_gpus"],
    "time": [CALL, "a reason", "rayfl resume DIR --actors N"],
    "death": [CALL, "a reason", "rayfl resume DIR --actors N"],
    "start": ["a reason", "--actors"],
    "objects": ["a reason"],
    "coordinator": ["a reason", "rayfl resume runs/a"],
}
"""What the sentence that ends a run says besides the number of losses."""


def loss(cause: Cause, times: int, reason: str = "a reason") -> Failure:
    return Failure(cause, times, reason, "rayfl resume runs/a" if cause == "coordinator" else CALL, 42)


@pytest.mark.parametrize("cause", TRIES)
def test_a_loss_is_tried_again_until_its_cause_allows_no_more(cause: Cause, caplog: pytest.LogCaptureFixture):
    allowed = 4 if cause in ("memory", "time") else 10
    for times in range(1, allowed):
        try_again(loss(cause, times))
    of_call = [CALL, "42", "a reason"] if cause in ("memory", "time", "death") else []
    for times, notice in enumerate(logged(caplog), 1):
        check_sentence(notice, [f"try {times + 1} of {allowed}", *of_call])
    assert len(logged(caplog)) == allowed - 1
    with refused(names=[str(allowed), *FACTS[cause]], error=ClusterError):
        try_again(loss(cause, allowed))


def test_a_notice_has_the_begin_of_a_long_reason_and_the_error_has_all(caplog: pytest.LogCaptureFixture):
    reason = "word " * 30 + "end\nand a traceback"
    try_again(loss("death", 1, reason))
    (notice,) = logged(caplog)
    assert "word word..." in notice and "end" not in notice and "traceback" not in notice
    with pytest.raises(ClientError) as raised:
        try_again(loss("death", 10, reason), ClientError)
    assert reason in str(raised.value)


def test_only_new_rounds_are_progress():
    setbacks = Setbacks()
    # Before any round, twice; after rounds 4, 3 (played again) and 4 (again); after round 5; after 2 (again).
    assert [setbacks.add(reached) for reached in (-1, -1, 4, 3, 4, 5, 2)] == [1, 2, 1, 2, 3, 1, 2]


def test_the_policy_knows_no_ray():
    subprocess.run([sys.executable, "-c", "import sys, actors.errors; assert 'ray' not in sys.modules"], check=True)
