"""The live area of a terminal: stages, the clients of a round, the time left, and one bar for a sweep."""

import io
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from actors import supervision
from jobs import console
from jobs.console import Audience
from jobs.display import STOPPING, Display, Overall
from jobs.single import run
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor, Wave
from rayfl.rounds.ledger import RoundRow
from tests.actors.toys import experiment, played
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of terminal does not depend on where the tests run."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def display(terminal: None) -> Iterator[Display]:
    with Display(console=Console(file=io.StringIO(), force_terminal=True, width=200)) as area:
        yield area


def shown(display: Display) -> str:
    """What the terminal shows at this moment, a line each."""
    paper = Console(file=io.StringIO(), width=200)
    paper.print(display._progress.get_renderable())
    assert isinstance(paper.file, io.StringIO)
    return "\n".join(" ".join(line.replace("\u2501", "").split()) for line in paper.file.getvalue().splitlines())


def row(number: int, wall_s: float = 1.0) -> RoundRow:
    return RoundRow(number, 4, 4, 8_000_000, 0, 0.0, wall_s)


def test_it_names_what_is_being_started_and_counts_its_seconds(display: Display):
    display.stage("loading")
    assert shown(display) == "loading 0:00:00"
    display.stage("starting Ray")
    assert shown(display) == "starting Ray 0:00:00"
    with console.following(3, "a run", Audience(display=display)):
        assert "starting Ray" not in shown(display) and "a run" in shown(display)


def test_nothing_of_it_goes_to_a_file_or_a_pipe():
    paper = io.StringIO()
    with Display(console=Console(file=paper)) as area:
        area.stage("loading")
        with console.following(1, "a run", Audience(display=area)) as show:
            show.wave(Wave("train", 1, 2))
            show(row(0), {})
            show.stopping()
    assert paper.getvalue() == ""


def test_a_terminal_that_cannot_change_what_it_has_shown_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TERM", "dumb")
    area = Display(console=Console(force_terminal=True))
    with console.following(2, "a run", Audience(display=area)) as show:
        show(row(0), {"own/accuracy": 0.5})
    line_with(capsys.readouterr().out, ["1/2", "own/accuracy 0.5000"])


def test_a_bar_shows_the_clients_of_the_round_under_way(display: Display):
    with console.following(40, "a run", Audience(display=display)) as show:
        show.wave(Wave("train", 120, 500))
        line_with(shown(display), ["1/40", "client 120 of 500"])
        show(row(0), {"own/accuracy": 0.5, "train/loss": 2.0})
        line_with(shown(display), ["1/40", "own/accuracy 0.5000", "1.00 MB"])
        show.wave(Wave("evaluate", 3, 500))
        line_with(shown(display), ["2/40", "own/accuracy 0.5000", "evaluating", "client 3 of 500"])
        # The pooled test set has no clients, and a round without evaluation keeps the last accuracy.
        show.wave(Wave("evaluate_pooled", 0, 0))
        show(row(1), {"train/loss": 1.0})
        line_with(shown(display), ["2/40", "own/accuracy 0.5000", "2.00 MB"])


def test_a_signal_is_answered_at_once(display: Display):
    with (
        console.following(40, "a run", Audience(display=display)) as show,
        supervision.stoppable(show.stopping) as stopping,
    ):
        show.wave(Wave("train", 1, 500))
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping() and STOPPING in shown(display)
        show.wave(Wave("train", 2, 500))
        show(row(0), {})
        assert STOPPING in shown(display)
    with console.following(40, "another", Audience(display=display)), supervision.stoppable() as stopping:
        assert not stopping()


def test_the_time_left_is_shown_once_it_is_known(display: Display, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(display._progress, "get_time", lambda: now[0])
    with console.following(10, "a run", Audience(display=display)) as show:
        assert shown(display).endswith("-:--:--")
        # rich forgets a step after 30 s unless it is asked not to.
        for number in range(4):
            now[0] += 60.0
            show(row(number), {})
        assert shown(display).endswith("0:04:00 0:06:00")


@pytest.mark.parametrize("title", ["demo", "personal-fmnist, a long label"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_time_left_and_the_accuracy_fit_into_a_narrow_terminal(
    width: int, title: str, terminal: None, monkeypatch: pytest.MonkeyPatch
):
    now, frames = [0.0], list[str]()
    area = Display(console=Console(file=io.StringIO(), force_terminal=True, width=width))
    monkeypatch.setattr(area._progress, "get_time", lambda: now[0])

    def frame() -> None:
        paper = Console(file=io.StringIO(), width=width)
        paper.print(area._progress.get_renderable())
        assert isinstance(paper.file, io.StringIO)
        frames.append(paper.file.getvalue().rstrip("\n"))

    accuracies = {"own/accuracy": 0.8125, "own_after_training/accuracy": 0.875, "train/loss": 2.0}
    with area, console.following(200, title, Audience(display=area)) as show:
        for number in range(20):
            for done in range(1, 20):
                now[0] += 3.0
                show.wave(Wave("train", done, 20))
                frame()
            show(row(number), accuracies)
            frame()
        # One round is not enough to know the time of the others.
        for one in frames[40:]:
            assert re.search(r" \d:\d\d:\d\d \d:\d\d:\d\d$", one) and "own/accuracy 0.8125" in one, one
            assert len(one) <= width and "\n" not in one
            assert title[:7] in one or width == 60
            assert width < 120 or "client " in one or "own_after_training/accuracy 0.8" in one
        show.stopping()
        frame()
        assert STOPPING in frames[-1]
    area.close()


def test_the_inline_executor_tells_how_many_clients_are_done():
    setup = prepare(experiment(rounds=1))
    waves: list[Wave] = []
    records, _ = played(setup, InlineExecutor(setup, waves.append))
    trained = [wave for wave in waves if wave.kind == "train"]
    selected = records[0].row.selected
    assert [wave.done for wave in trained] == list(range(1, selected + 1)) and {wave.total for wave in trained} == {8}
    personal = prepare(experiment("local", rounds=1))
    waves.clear()
    played(personal, InlineExecutor(personal, waves.append))
    assert [wave for wave in waves if wave.kind == "evaluate"][-1] == Wave("evaluate", 10, 10)


def test_a_sweep_has_one_bar_for_all_of_its_runs(display: Display):
    overall = Overall(display, 4)
    line_with(shown(display), ["0 of 4", "0:00:00"])
    overall.over()
    assert "1 of 4 runs" in shown(display)
    overall.stopping()
    line_with(shown(display), ["stopping", "Ctrl-C"])


def test_a_command_on_a_terminal_shows_all_of_it_above_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "small.toml"
    file.write_text(
        'rounds = 1\ndata = "digits"\npartition = "iid"\nclients.count = 2\nmodel = "logistic"\nmethod = "fedavg"\n'
        "[runtime]\nexecutor = 'inline'\n[output]\ntrack = []\n"
    )
    text = rayfl("run", file, "--output", tmp_path / "run").stdout
    places = [text.index(words) for words in ("loading", "reading the data", "round 1/1", "drawing the page", "uplink")]
    assert places == sorted(places) and "rounds  pooled" not in text
    monkeypatch.setattr("jobs.sweep.draw", lambda *_: None)
    text = rayfl("sweep", file, "output.report=false", "sweep.seed=[1, 2]", "--dir", tmp_path / "sweep").stdout
    assert text.index("2 experiments") < text.index("2 of 2 runs")


def test_a_page_that_a_kill_prevented_is_drawn_by_resume_and_by_report(tmp_path: Path, undrawn: None):
    small = experiment(rounds=1, runtime={"executor": "inline"}, output={"track": ()})
    directory = run(small, tmp_path / "run")
    for command in ("resume", "report"):
        (directory / "report.html").unlink()
        result = rayfl(command, directory)
        assert result.exit_code == 0, result.output
        assert (directory / "report.html").exists() and "uplink" in result.stdout
    refused(rayfl("resume", directory), names=[directory, "finished", "--rounds"])


def test_titles_words_and_log_records_cannot_command_the_terminal():
    paper = io.StringIO()
    with Display(console=Console(file=paper, force_terminal=True, color_system=None, width=200)) as area:
        area.stage("reading \x1b[2J[/red]")
        area.line("title \x1b[2J[/red]", 3).update(1, "words \x1b[2J[/red]")
        console._Lines().handle(logging.makeLogRecord({"msg": "record \x1b[2J[/red]\nsecond line"}))
    assert "\x1b[2J" not in paper.getvalue()
    for word in ("title", "words", "record"):
        assert f"{word} \\x1b[2J[/red]" in paper.getvalue(), paper.getvalue()
