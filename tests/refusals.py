"""One way to test a message to the user: by the facts in it, so that its words can be improved."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import pytest
from click.testing import Result

from rayfl.errors import RayflError

MOST_CHARACTERS = 600
"""The longest message that still counts as one sentence. The names that a test gives do not count."""


class Refused(AbstractContextManager[pytest.ExceptionInfo[Any]]):
    """`pytest.raises(error)`, followed by a check of the error's sentence."""

    def __init__(self, names: Sequence[object], error: type[BaseException]) -> None:
        self.names = names
        self.raises = pytest.raises(error)

    def __enter__(self) -> pytest.ExceptionInfo[Any]:
        self.caught = self.raises.__enter__()
        return self.caught

    def __exit__(self, *raised: Any) -> bool:
        __tracebackhide__ = True
        suppressed = self.raises.__exit__(*raised)
        if suppressed:
            check_sentence(str(self.caught.value), self.names)
        return suppressed


@overload
def refused(tried: None = None, /, *, names: Sequence[object], error: type[BaseException] = RayflError) -> Refused: ...
@overload
def refused(
    tried: Result | Callable[[], object], /, *, names: Sequence[object], error: type[BaseException] = RayflError
) -> str: ...
def refused(
    tried: Result | Callable[[], object] | None = None,
    /,
    *,
    names: Sequence[object],
    error: type[BaseException] = RayflError,
) -> Refused | str:
    """Check that a mistake is refused in one sentence that has all `names`.

    `names` are the facts that the user needs: the setting, the value given, what is allowed, the command to use
    instead. `mentions` says when a name counts as mentioned. As a context manager it checks the `error` that the block
    raises; a call without arguments or the result of a command is checked at once, and its sentence is returned:

        with refused(names=["keep_ratio=0.0", "(0, 1]"]):
            TopK(keep_ratio=0.0)
        refused(lambda: read(path), names=["method.lr", "-1"])
        with refused(names=["client 3", "round 2"], error=ClientError):
            train(setup)
        refused(rayfl("run", "demoo"), names=["demoo", "did you mean 'demo'"])

    A command must end with exit code 2 and print nothing but the line to the standard error.
    """
    if tried is None:
        return Refused(names, error)
    if isinstance(tried, Result):
        assert tried.exit_code == 2, tried.output
        assert tried.stderr.startswith("rayfl: "), tried.stderr
        sentence = tried.stderr.removeprefix("rayfl: ").removesuffix("\n")
        check_sentence(sentence, names)
        return sentence
    with Refused(names, error) as caught:
        tried()
    return str(caught.value)


def check_sentence(text: str, names: Sequence[object]) -> None:
    """Check that `text` is one line, a sentence of sensible length, and mentions all `names`."""
    __tracebackhide__ = True
    assert not isinstance(names, str), "names is a list of facts, not one string"
    assert names, "name the facts that the user needs: a test of no fact hardly fails"
    missing = [str(name) for name in names if not mentions(text, str(name))]
    assert not missing, f"the message lacks {missing}: {text}"
    assert text.isprintable(), f"not one line of printable characters: {text!r}"
    assert len(text.split()) >= 3, f"no sentence: {text!r}"
    rest = text
    for name in sorted(map(str, names), key=len, reverse=True):
        rest = rest.replace(name, "")
    assert len(rest) <= MOST_CHARACTERS, f"{len(rest)} characters are too long for one sentence: {text}"
    assert " object at 0x" not in text, f"it shows an object's address: {text}"


def line_with(lines: str | Iterable[str], names: Sequence[object]) -> str:
    """Return the one line of a command's output, or of a log, that mentions all `names`; it must be a good sentence."""
    __tracebackhide__ = True
    lines = lines.splitlines() if isinstance(lines, str) else list(lines)
    found = [line for line in lines if all(mentions(line, str(name)) for name in names)]
    assert len(found) == 1, f"{len(found)} lines instead of one mention {list(map(str, names))}: {lines}"
    check_sentence(found[0], names)
    return found[0]


def mentions(text: str, name: str) -> bool:
    """True if `name` stands in `text` as whole words and whole numbers: neither 1 in "10" or "1.5" nor lr in "lrs"."""
    before = r"(?<![\w.])" if name[:1].isdigit() else r"(?<!\w)" if re.match(r"[^\W\d]|[-+]\d", name) else ""
    after = r"(?!\w|\.\d)" if name[-1:].isdigit() else r"(?!\w)" if name[-1:].isalpha() or name[-1:] == "_" else ""
    return re.search(before + re.escape(name) + after, text) is not None
