"""The live area of a terminal: at once, with the round's clients, a steady time left, and one bar for a sweep."""

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from actors import session
from jobs import console
from jobs.display import STOPPING, Display, clock
from jobs.overall import Overall
from jobs.single import run
from jobs.time_left import TimeLeft
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor, Wave
from rayfl.rounds.ledger import RoundRow
from tests.actors.toys import experiment, played
from tests.jobs.commands import rayfl


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of terminal does not depend on where the tests run."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def display(terminal: None) -> Iterator[Display]:
    with Display(Console(file=io.StringIO(), force_terminal=True, width=200)) as area:
        yield area


def shown(display: Display) -> str:
    """What the terminal shows at this moment, a line each."""
    assert display._progress is not None
    paper = Console(file=io.StringIO(), width=200)
    paper.print(display._progress.get_renderable())
    assert isinstance(paper.file, io.StringIO)
    return "\n".join(" ".join(line.replace("\u2501", "").split()) for line in paper.file.getvalue().splitlines())


def row(number: int, wall_s: float = 1.0) -> RoundRow:
    return RoundRow(number, 4, 4, 8_000_000, 0, 0.0, wall_s)


def test_it_names_what_is_being_started_and_counts_its_seconds(display: Display):
    display.stage("loading")
    assert shown(display) == "loading 0:00"
    display.stage("starting Ray")
    assert shown(display) == "starting Ray 0:00"
    with console.following(3, "a run", display=display):
        assert "starting Ray" not in shown(display) and "a run" in shown(display)


def test_nothing_of_it_goes_to_a_file_or_a_pipe():
    paper = io.StringIO()
    with Display(Console(file=paper)) as area:
        area.stage("loading")
        with console.following(1, "a run", "bar", display=area) as show:
            show.wave(Wave("train", 1, 2))
            show(row(0), {})
            show.stopping()
    assert paper.getvalue() == ""


def test_a_terminal_that_cannot_change_what_it_has_shown_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TERM", "dumb")
    area = Display(Console(force_terminal=True))
    with console.following(2, "a run", display=area) as show:
        show(row(0), {"own/accuracy": 0.5})
    assert capsys.readouterr().out.startswith("1/2 rounds  own/accuracy 0.5000")


def test_a_bar_shows_the_clients_of_the_round_under_way(display: Display):
    with console.following(40, "a run", display=display) as show:
        show.wave(Wave("train", 120, 500))
        assert "round 1/40, client 120 of 500" in shown(display)
        show(row(0), {"own/accuracy": 0.5, "train/loss": 2.0})
        assert "round 1/40 own/accuracy 0.5000 1.000 MB" in shown(display)
        show.wave(Wave("evaluate", 3, 500))
        assert "round 2/40, evaluating client 3 of 500 own/accuracy 0.5000" in shown(display)
        # The pooled test set has no clients, and a round without evaluation keeps the last accuracy.
        show.wave(Wave("evaluate_pooled", 0, 0))
        show(row(1), {"train/loss": 1.0})
        assert "round 2/40 own/accuracy 0.5000 2.000 MB" in shown(display)


def test_a_signal_is_answered_at_once(display: Display):
    with console.following(40, "a run", display=display) as show, session.stoppable(show.stopping) as stopping:
        show.wave(Wave("train", 1, 500))
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping() and STOPPING in shown(display)
        show.wave(Wave("train", 2, 500))
        show(row(0), {})
        assert STOPPING in shown(display)
    with console.following(40, "another", display=display), session.stoppable() as stopping:
        assert not stopping()


def test_the_time_left_does_not_jump_where_every_tenth_round_evaluates():
    now = [0.0]
    left = TimeLeft(100, 10, lambda: now[0])
    assert left() is None
    for round in range(50):
        seconds = 11.0 if round % 10 == 9 else 1.0
        now[0] += seconds
        left.add(round, seconds)
        if round >= 10:
            # What is left is known: a second for each plain round, eleven for each that evaluates.
            evaluating = 10 - (round + 1) // 10
            assert left() == pytest.approx((99 - round) + 10 * evaluating)
    now[0] += 3.0
    assert left() == pytest.approx(50 + 50 - 3)
    now[0] += 1000
    assert left() == 0.0


@pytest.mark.parametrize(("every", "left"), [(0, 3.0), (1, 3.0), (3, 3.0)])
def test_the_last_round_evaluates_whatever_the_others_do(every: int, left: float):
    estimate = TimeLeft(4, every, lambda: 0.0)
    estimate.add(0, 1.0)
    # Of three rounds that are left, those of the other kind have not come yet, and count as this one.
    assert estimate() == left


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
    now = [0.0]
    overall = Overall(display, 4, lambda: now[0])
    assert shown(display) == "all runs 0 of 4 runs 0:00"
    overall.begin("seed=1")
    overall.begin("seed=2")
    now[0] = 10.0
    overall.part("seed=1", 0.5, "20/40 rounds own/accuracy 0.5")
    overall.part("seed=2", 0.5)
    # One of four runs' worth took 10 seconds.
    assert "0 of 4 runs 0:00, about 0:30 left" in shown(display)
    assert "20/40 rounds own/accuracy 0.5" in shown(display)
    overall.over("seed=1")
    assert "1 of 4 runs" in shown(display) and "seed=1" not in shown(display) and "seed=2" in shown(display)
    overall.stopping()
    assert "stopping after the rounds under way; Ctrl-C again stops now" in shown(display)


def test_a_sweep_elsewhere_shows_no_bar():
    overall = Overall(Display(Console(file=io.StringIO())), 2)
    overall.begin("seed=1")
    overall.part("seed=1", 1.0)
    overall.over("seed=1")
    overall.stopping()
    assert not overall.live


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
    monkeypatch.setattr("jobs.sweep._page", lambda *_: None)
    text = rayfl("sweep", file, "output.report=false", "sweep.seed=[1, 2]", "--dir", tmp_path / "sweep").stdout
    assert "2 of 2 runs" in text and text.index("checking 2 experiments") < text.index("2 of 2 runs")


def test_a_page_that_a_kill_prevented_is_drawn_by_resume_and_by_report(tmp_path: Path, undrawn: None):
    small = experiment(rounds=1, runtime={"executor": "inline"}, output={"track": ()})
    directory = run(small, tmp_path / "run")
    for command in ("resume", "report"):
        (directory / "report.html").unlink()
        result = rayfl(command, directory)
        assert result.exit_code == 0, result.output
        assert (directory / "report.html").exists() and "uplink, all clients" in result.stdout
    again = rayfl("resume", directory)
    assert again.exit_code == 2 and "is finished; give --rounds to go on" in again.stderr


@pytest.mark.parametrize(("seconds", "words"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_seconds_as_a_clock_shows_them(seconds: float, words: str):
    assert clock(seconds) == words
