"""The benchmark of many clients, with few."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import Results
from benchmarks.many_clients import ROUNDS, bench_many_clients, main, runs, write_data
from tests.refusals import refused


@pytest.mark.parametrize("name", [*runs(20, 4)])
def test_each_run_is_played_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    tables = runs(20, 4)[name]
    write_data(tmp_path / "data.npz", tables["clients"]["count"])
    (tmp_path / "table.json").write_text(json.dumps(tables))
    main(str(tmp_path / "data.npz"), str(tmp_path / "run"), str(tmp_path / "table.json"))
    wall, cpu = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(wall) == len(cpu) == ROUNDS and min(wall) > 0


def test_more_participants_than_clients_are_refused(tmp_path: Path):
    with refused(names=["--participants=30", "--clients=20"]):
        bench_many_clients(20, 30, Results("scale", tmp_path / "figures.json", False))
