"""The line on the seconds of a further method, also where several processes share the tests."""

import pytest

from rayfl.choices.kinds import named
from rayfl.methods.base import Method
from tests.method_seconds import method_names, seconds_of_methods, summary


def report(nodeid: str, when: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", None, ""), {}, "passed", None, when, duration=duration)  # type: ignore[arg-type]


def test_every_method_is_named_by_its_file():
    assert named(Method).keys() <= method_names()


def test_seconds_of_contracts_are_summed_by_method_and_divided_by_their_number():
    reports = [
        report("tests/contracts/test_methods.py::test_it[fedavg]", "setup", 1.0),
        report("tests/contracts/test_methods.py::test_it[fedavg]", "call", 2.0),
        report("tests/contracts/test_methods.py::test_it[joint-ditto]", "call", 5.0),
        # Neither a method nor a contract.
        report("tests/contracts/test_compressors.py::test_it[topk]", "call", 50.0),
        report("tests/rounds/test_rounds.py::test_it[fedavg]", "call", 50.0),
    ]
    seconds = seconds_of_methods(reports, {"fedavg", "ditto"})
    assert seconds == {"fedavg": 3.0, "ditto": 5.0}
    assert "4.0 s" in summary(seconds) and "2 methods" in summary(seconds) and "ditto" in summary(seconds)
    assert summary({}) == ""
