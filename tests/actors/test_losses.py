"""What is done about every kind of loss, up to its bound and at it; no Ray needed."""

import subprocess
import sys

import pytest

from actors.losses import ADVICE, TRIES, Cause, Decision, Loss, Setbacks, decide

CALL = "round 3, train, clients 4 to 7"
GONE = f"{CALL}: client actor 42 is gone (a reason); its call is sent again"
DIED = f"{CALL}: the actor died or did not answer in {{}} tries; if memory ran out, {ADVICE}. The last time: a reason"
# For each cause: how often it may come, the notice of the first loss, the error of the last.
EXPECTED: dict[Cause, tuple[int, str, str]] = {
    "memory": (4, f"{GONE}, try 2 of 4", f"a reason, 4 times; {ADVICE}"),
    "time": (4, f"{GONE}, try 2 of 4", DIED.format(4)),
    "death": (10, f"{GONE}, try 2 of 10", DIED.format(10)),
    "start": (
        10,
        "a client actor died while it started (a reason); another one starts, try 2 of 10",
        "10 client actors died while they started; if memory ran out, use fewer (--actors); the last one said: "
        "a reason",
    ),
    "objects": (
        10,
        "objects were lost with a node (a reason); playing again from the disk",
        "objects were lost 10 times in a row, the last time: a reason",
    ),
    "coordinator": (
        10,
        "the coordinator is gone; another one takes the run from the disk, try 2 of 10",
        f"the coordinator died 10 times; go on with: {CALL} (the last time Ray said: a reason)",
    ),
}


@pytest.mark.parametrize("cause", TRIES)
def test_a_loss_is_tried_again_until_its_cause_allows_no_more(cause: Cause):
    times, notice, error = EXPECTED[cause]
    decisions = [decide(Loss(cause, number, "a reason", CALL, 42)) for number in range(1, times + 1)]
    assert [decision.again for decision in decisions] == [True] * (times - 1) + [False]
    assert decisions[0] == Decision(True, notice) and decisions[-1] == Decision(False, error)


def test_a_notice_has_the_first_line_of_a_long_reason_and_the_error_has_all():
    reason = "x" * 130 + "\nand a traceback"
    assert f"({'x' * 117}...)" in decide(Loss("death", 1, reason, CALL, 42)).sentence
    assert decide(Loss("death", 10, reason, CALL, 42)).sentence.endswith(reason)


def test_only_new_rounds_are_progress():
    setbacks = Setbacks()
    # Before any round, twice; after rounds 4, 3 (played again) and 4 (again); after round 5.
    assert [setbacks.add(reached) for reached in (-1, -1, 4, 3, 4, 5)] == [1, 2, 1, 2, 3, 1]


def test_a_round_that_was_reached_before_is_not_new():
    setbacks = Setbacks()
    assert [setbacks.add(reached) for reached in (9, 2, 7, 9)] == [1, 2, 3, 4]


def test_the_policy_knows_no_ray():
    subprocess.run([sys.executable, "-c", "import sys, actors.losses; assert 'ray' not in sys.modules"], check=True)
