"""What a run shows of its log: a line each, or lines above the bar, and nothing where the program logs by itself."""

import logging

import pytest

from jobs import console
from jobs.console import Audience
from jobs.display import Display
from tests.actors.toys import logged

LOG = logging.getLogger("rayfl")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pytest's own handlers, as in a program that does not set up logging."""
    monkeypatch.setattr(LOG, "hasHandlers", lambda: False)


@pytest.mark.usefixtures("silent")
def test_a_job_log_has_a_plain_line_for_each_record(capsys: pytest.CaptureFixture[str]):
    with console.following(3, "a run", Audience()):
        LOG.info("going on from the checkpoint before round %d", 2)
        LOG.warning("[bold]an actor[/bold] is gone")
    LOG.info("nobody is listening any more")
    printed = capsys.readouterr()
    assert printed.out == "going on from the checkpoint before round 2\n[bold]an actor[/bold] is gone\n"
    assert printed.err == "" and LOG.level == logging.NOTSET


@pytest.mark.usefixtures("silent")
def test_a_terminal_has_the_records_above_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Display() as display, console.following(3, "a run", Audience(display=display)):
        LOG.warning("[bold]an actor[/bold] is gone")
    printed = capsys.readouterr().out
    assert printed.count("[bold]an actor[/bold] is gone") == 1 and "a run" in printed


def test_a_program_that_logs_by_itself_has_every_record_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    # The handlers of pytest are on the root logger, as those of logging.basicConfig are.
    with console.following(3, "a run", Audience()):
        LOG.warning("an actor is gone")
    assert logged(caplog) == ["an actor is gone"] and capsys.readouterr().out == ""
