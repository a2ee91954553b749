"""Wrong inputs of ten kinds: each gets one sentence that names the key or the file, and nothing is written.

The riskiest run in every test run, all of them by `make hostile`, which ends with a line of counts.
"""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from jobs import failures
from rayfl.run_directory.record import read_run
from tests.hostile import child, world
from tests.hostile.case import Case
from tests.hostile.kinds import CASES

ROOT = Path(__file__).resolve().parents[2]
MOST_PROCESSOR_S = 3.0
"""Of a refusal."""
MOST_MEMORY_BYTES = 1 << 30

NOT_OURS = (
    "Traceback",
    "Error:",
    "Error(",
    "Exception",
    "Ray would have been started",
    failures.sentence_and_code(RuntimeError())[0].partition(":")[0],
    "embedded null",
    "Exceeds the limit",
    "Overflow when",
    "int too large",
    "too large to convert",
    "out of bounds",
    "repeats may not",
    "invalid literal",
    "could not convert",
    "NoneType",
    "has no attribute",
    "not subscriptable",
    "not iterable",
    "not callable",
    "unhashable",
    "unexpected keyword",
    "positional argument",
    "required argument",
    "codec can't",
    "Expecting ",
    "Extra data:",
    "Unterminated string",
    "index out of range",
    "division by zero",
    "recursion depth",
    "Unable to allocate",
    "array is too big",
    "buffer is smaller",
    "cannot reshape",
    "broadcast",
    "shape mismatch",
    "[Errno",
    "<class ",
    "object at 0x",
    "pydantic",
    "Input should",
    "type=",
    "cannot be interpreted as",
    "not supported between",
    "operand",
    "Header",
)
"""Wording of Python's, numpy's, torch's and pydantic's errors, which says nothing to a user."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world.warm_up()
    home = tmp_path_factory.mktemp("runs")
    world.make_runs(home)
    return home


def marked(case: Case) -> object:
    return pytest.param(case, id=str(case), marks=[] if case.in_suite else [pytest.mark.hostile])


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_wrong_input_gets_a_sentence_and_changes_nothing(
    case: Case, runs: Path, tmp_path: Path, record_property: Callable[[str, object], None]
):
    directory = tmp_path / "case"
    world.prepare(case, directory, runs)
    before = world.listing(directory)
    outcome = child.command(case.argv, directory, tmp_path / "log")
    check(case, outcome, before, directory, runs, record_property)


@pytest.mark.hostile
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in CASES if case.in_process])
def test_a_process_answers_as_its_command_does(
    case: Case, runs: Path, tmp_path: Path, record_property: Callable[[str, object], None]
):
    directory = tmp_path / "case"
    world.prepare(case, directory, runs)
    before = world.listing(directory)
    check(case, child.process(case.argv, directory, ROOT), before, directory, runs, record_property)


def check(
    case: Case,
    outcome: child.Outcome,
    before: dict[str, str],
    directory: Path,
    runs: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """What holds after every case; the counts go to the line at the end."""
    new, replaced = world.changed(before, world.listing(directory), tuple(case.may_write))
    lines = outcome.stderr.strip().splitlines()
    foreign = [word for word in NOT_OURS if word in outcome.stderr]
    for name, count in (
        ("cases", 1),
        ("tracebacks", int("Traceback" in outcome.stderr or (-outcome.code in range(1, 64) and not outcome.hung))),
        ("hangs", int(outcome.hung)),
        ("files replaced", len(replaced)),
    ):
        record_property(name, count)
    assert not outcome.hung, f"no end within {child.HANGS_S} s"
    assert not foreign, outcome.stderr
    assert outcome.code == case.code, outcome.stderr
    if case.fails:
        assert len(lines) == 1 and lines[0].startswith("rayfl: "), outcome.stderr
    # Notices of a run that goes on lie between the lines of its rounds.
    said = outcome.stderr if case.fails else outcome.stdout + outcome.stderr
    missing = [word for word in case.names if word not in said]
    assert not missing, f"{missing} not in: {said}"
    assert not replaced and not new
    assert not case.is_refused or outcome.processor_s < MOST_PROCESSOR_S
    assert outcome.memory_bytes < MOST_MEMORY_BYTES
    if case.same_bits:
        found, whole = read_run(directory / "run"), read_run(runs / "done")
        for table in ("rounds", "clients", "metrics"):
            assert plain(getattr(found, table)) == plain(getattr(whole, table)), table


def plain(table: pa.Table) -> dict[str, list[object]]:
    """A table's columns but for the real seconds, which no two runs share."""
    return {name: column for name, column in table.to_pydict().items() if name != "wall_s"}


def test_there_are_three_hundred_wrong_inputs_of_ten_kinds():
    wrong = [case for case in CASES if case.fails]
    assert len(wrong) >= 300 and len({case.kind for case in wrong}) == 10
    assert len({str(case) for case in CASES}) == len(CASES)
    assert {case.kind for case in CASES if case.code == 0} == {case.kind for case in CASES}
