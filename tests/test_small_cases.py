"""Every small case is tried, and a failure names its case."""

import pytest

from tests.small_cases import small_cases

TRIED: list[tuple[int, str]] = []


@small_cases("number, word", [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
def odd(base: int, number: int, word: str) -> None:
    TRIED.append((number, word))
    if number == 4:
        pytest.fail("four")
    assert (base + number) % 2


def test_every_case_is_tried_and_those_that_fail_are_named():
    TRIED.clear()
    with pytest.raises(BaseExceptionGroup, match="2 of 4") as raised:
        odd(base=0)
    assert [number for number, _ in TRIED] == [1, 2, 3, 4]
    assert [error.__notes__ for error in raised.value.exceptions] == [
        ["case: number=2, word='two'"],
        ["case: number=4, word='four'"],
    ]


@small_cases("number", [3])
def three(number: int) -> None:
    assert number == 4


def test_a_single_failure_is_raised_as_it_is():
    with pytest.raises(AssertionError) as raised:
        three()
    assert raised.value.__notes__ == ["case: number=3"]


@pytest.mark.parametrize("base", [1, 3])
@small_cases("number", [2, 4])
def test_fixtures_and_parameters_come_as_ever(base: int, number: int, tmp_path: object):
    assert (base + number) % 2 and tmp_path
