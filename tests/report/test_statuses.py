"""Who took part: statuses counted over rounds, in the order and the words of the page."""

from pathlib import Path

from rayfl.population.client import ClientStatus
from rayfl.report.groups import Group
from rayfl.report.page import report
from rayfl.report.page_tables import _STATUSES, statuses
from rayfl.rounds.ledger import ClientRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, read_run
from rayfl.run_directory.run_folder import create_run_directory
from tests.hand_written import heading
from tests.refusals import mentions


def group(directory: Path, *rounds: tuple[str, ...]) -> Group:
    create_run_directory(directory)
    Description({"name": directory.name, "seed": 1}).write(directory, {"torch": "2.13.0"})
    with Recorder(directory) as recorder:
        for round, some in enumerate(rounds):
            rows = [ClientRow(client, status, 0, 0, 0, 0, 1.0) for client, status in enumerate(some)]
            delivered = some.count("delivered")
            recorder.round(RoundRow(round, len(rows), delivered, 0, 0, 1.0, 0.1), rows, [])
    return Group(directory.name, (read_run(directory),))


def test_every_status_is_known():
    assert set(_STATUSES) == set(ClientStatus)


def test_one_run_has_a_row_a_status(tmp_path: Path):
    one = group(tmp_path / "one", ("delivered", "late", "late"), ("delivered", "upload_lost"), ("delivered",) * 3)
    table = statuses([one])
    assert table is not None
    heads, rows, *_ = table
    assert [(name, cell) for name, cell, _ in rows] == [
        ("delivered", "5 (62.5 %)"),
        ("upload lost", "1 (12.5 %)"),
        ("late", "2 (25.0 %)"),
    ]
    # The last column is the reason.
    assert len(heads) == 3 and all(why for _, _, why in rows)
    assert mentions(rows[2][2], "deadline")


def test_several_runs_have_a_column_each(tmp_path: Path):
    calm = group(tmp_path / "calm", ("delivered", "delivered"))
    assert statuses([calm]) is None
    wild = group(tmp_path / "wild", ("surplus", "delivered"), ("delivered", "delivered"))
    twice = Group("both", (calm.runs[0], wild.runs[0]))
    table = statuses([calm, wild, twice])
    assert table is not None
    assert table.heads == ["What became of a client", "calm", "wild", "both", "Why"]
    # Means over seeds: (2 + 3) / 2 and (0 + 1) / 2.
    assert [row[:4] for row in table.rows] == [
        ["delivered", "2 (100.0 %)", "3 (75.0 %)", "2.5 (83.3 %)"],
        ["surplus", "0 (0.0 %)", "1 (25.0 %)", "0.5 (16.7 %)"],
    ]


def test_the_page_says_who_took_part(tmp_path: Path):
    one = group(tmp_path / "one", ("delivered", "late"))
    html = report([one.runs[0].directory], tmp_path / "report.html").read_text(encoding="utf-8")
    assert heading(html, "statuses") and mentions(html.partition('id="statuses"')[2], "deadline")
    calm = group(tmp_path / "calm", ("delivered", "delivered"))
    html = report([calm.runs[0].directory], tmp_path / "calm.html").read_text(encoding="utf-8")
    assert heading(html, "statuses") == ""
