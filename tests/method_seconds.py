"""The seconds that a further method adds to the tests: what the contracts take for each method that they play."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

METHODS = Path(__file__).resolve().parents[1] / "rayfl" / "methods"


def method_names() -> set[str]:
    """The names of rayfl's methods, which are those of their files, in whatever folder."""
    return {path.stem for path in METHODS.rglob("*.py")} - {"__init__", "base"}


def seconds_of_methods(reports: Iterable[pytest.TestReport], names: Collection[str]) -> dict[str, float]:
    """The seconds of all tests of tests/contracts that were made for a method, by its name: set-up, call and end."""
    seconds: dict[str, float] = {}
    for report in reports:
        made_for = re.fullmatch(r"tests/contracts/.*?\[(.*)\]", report.nodeid)
        words = made_for[1].split("-") if made_for else []
        for name in dict.fromkeys(word for word in words if word in names):
            seconds[name] = seconds.get(name, 0.0) + report.duration
    return seconds


def summary(seconds: dict[str, float]) -> str:
    """The line that ends a run of the tests; "" if no method was played."""
    total, dearest = sum(seconds.values()), max(seconds, key=seconds.__getitem__, default="")
    mean = total / max(len(seconds), 1)
    words = f"a further method adds {mean:.1f} s: contracts of {len(seconds)} methods took {total:.0f} s in one process"
    return f"{words}, {dearest} the most, {seconds[dearest]:.1f} s" if seconds else ""
