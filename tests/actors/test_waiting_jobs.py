"""Who takes which job, without Ray: a job's own node first, and nobody waits."""

import pytest

from actors.object_store import WaitingJobs, homes


def test_the_home_of_a_job_is_where_most_of_its_inputs_lie() -> None:
    stored = {"a": 30, "b": 50, "c": 20}
    assert homes([stored], ["a", "b", "c"]) == ["b"]
    # Nobody works on b, for example because it is the head.
    assert homes([stored], ["a", "c"]) == ["a"] and homes([stored], ["d"]) == ["d"]
    assert homes([{"a": 5, "b": 5}], ["a", "b"]) == ["b"]
    assert homes([{}], ["a"]) == ["a"]


def test_jobs_without_inputs_are_spread_over_the_nodes_in_their_order() -> None:
    assert homes([{}, {}, {}, {"a": 5}, {}], ["a", "b", "b", "b"]) == ["a", "a", "b", "a", "b"]


def taken(waiting: WaitingJobs, nodes: str) -> list[int]:
    return [waiting.take(node) for node in nodes]


@pytest.mark.parametrize(
    ("homes", "nodes", "expected"),
    [
        # Without homes in their order, whoever is free.
        ([None] * 4, "abca", [0, 1, 2, 3]),
        (["a", "b", "a", "b"], "bbaa", [1, 3, 0, 2]),
        # c has nothing at home, and takes first what is at home nowhere, then from the longest queue.
        (["a", "a", "a", "b", None], "cca", [4, 0, 1]),
        # b's own job is done, and a's wait: nobody is idle.
        (["a", "a", "b"], "bba", [2, 0, 1]),
    ],
)
def test_a_free_actor_takes_a_job_of_its_node_or_another_one(homes, nodes: str, expected: list[int]) -> None:
    waiting = WaitingJobs(homes)
    assert taken(waiting, nodes) == expected
    assert len(waiting) == len(homes) - len(expected)


def test_a_job_that_is_sent_again_goes_first_and_is_counted_once() -> None:
    waiting = WaitingJobs(["a", "a", "b"])
    assert waiting.take("a") == 0
    waiting.put_back(0)
    waiting.put_back(0)
    assert len(waiting) == 3 and taken(waiting, "aab") == [0, 1, 2]


def test_after_an_error_only_earlier_jobs_are_left() -> None:
    waiting = WaitingJobs(["a", "b", "a", "b", None])
    waiting.keep_before(2)
    assert len(waiting) == 2 and sorted(taken(waiting, "ca")) == [0, 1]
    assert not waiting and not waiting.at_home("a")


def test_homes_are_known_as_long_as_a_job_has_one() -> None:
    waiting = WaitingJobs(["a", None])
    assert not waiting.homeless and waiting.at_home("a") and not waiting.at_home("b")
    assert waiting.take("a") == 0
    assert waiting.homeless and not WaitingJobs([None]).at_home("a")
