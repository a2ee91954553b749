"""The helper by which messages are tested fails where it should."""

import pytest
from click.testing import Result

from rayfl.errors import RayflError
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with, mentions, refused

SENTENCE = "method.lr=-1.0 is not positive; give 0.1, which most experiments use"


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (SENTENCE, "method.lr", True),
        (SENTENCE, "lr", True),
        (SENTENCE, "-1.0", True),
        (SENTENCE, "method.lr=-1.0", True),
        (SENTENCE, "experiment", False),
        (SENTENCE, "1", False),
        (SENTENCE, "0.1", True),
        ("take one of 1, 2.", "2", True),
        ("take one of 1, 25", "2", False),
        ("keep_ratio=0.0 is outside (0, 1]", "(0, 1]", True),
        ("keep_ratio=0.05 is outside (0, 1]", "keep_ratio=0.0", False),
        ("1e-10 is too small", "-10", False),
        ("did you mean 'demo'?", "'demo'", True),
    ],
)
def test_names_are_whole_words_and_numbers(text: str, name: str, expected: bool) -> None:
    assert mentions(text, name) is expected


@pytest.mark.parametrize(
    ("text", "names", "why"),
    [
        (SENTENCE, ["method.momentum"], "lacks"),
        (SENTENCE, [], "facts"),
        (SENTENCE, "method.lr", "list"),
        ("", ["x"], "lacks"),
        ("lr=1", ["lr"], "no sentence"),
        (SENTENCE + "\nand more", ["lr"], "one line"),
        (SENTENCE * 20, ["lr"], "too long"),
        ("<Model object at 0x7f11> is no model for mnist", ["mnist"], "address"),
    ],
)
def test_what_is_no_good_sentence_is_found(text: str, names: list[str], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check_sentence(text, names)
    with pytest.raises(AssertionError, match=why), refused(names=names):
        raise RayflError(text)


def test_a_line_is_found_by_its_facts() -> None:
    lines = ["round 1 of 3", SENTENCE, "round 2 of 3"]
    for given in (lines, "\n".join(lines)):
        assert line_with(given, ["method.lr", -1.0]) == SENTENCE
        for names in (["method.momentum"], ["of 3"]):
            with pytest.raises(AssertionError, match="lines instead of one"):
                line_with(given, names)
    with pytest.raises(AssertionError, match="no sentence"):
        line_with(["lr=1"], ["lr"])


def test_a_block_and_a_call_are_checked_alike() -> None:
    with refused(names=["method.lr", -1.0]) as caught:
        fail(RayflError(SENTENCE))
    assert caught.value.reason == SENTENCE
    assert refused(lambda: fail(RayflError(SENTENCE)), names=["method.lr"]) == SENTENCE
    with pytest.raises(pytest.fail.Exception):
        refused(lambda: None, names=["method.lr"])
    with pytest.raises(KeyError), refused(names=["method.lr"]):
        fail(KeyError(SENTENCE))
    with pytest.raises(ValueError, match="a stranger's"), refused(names=["stranger's"]):
        fail(ValueError("a stranger's sentence, and not ours"))
    with refused(names=["stranger's"], error=ValueError):
        fail(ValueError("a stranger's sentence, and not ours"))


def test_a_command_ends_with_code_two_and_one_line() -> None:
    refused(rayfl("run", "nowhere.toml"), names=["nowhere.toml"])
    for result in (rayfl("--version"), rayfl("run", "nowhere.toml")):
        assert isinstance(result, Result)
        with pytest.raises(AssertionError):
            refused(result, names=["elsewhere.toml"])
