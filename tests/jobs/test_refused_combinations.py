"""Combinations that a sweep cannot run: a sentence before anything starts, or a list beside the runs of the others."""

import re
from pathlib import Path

import pytest

from rayfl.run_directory.record import read_refused
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused

SWEEP = """
rounds = 2
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
output = {report = false, save_models = false}

[sweep]
case = [
    {label = "D-PSGD", method = {name = "dpsgd", lr = 0.1}},
    {label = "DSGT", method = {name = "dsgt", lr = 0.1}},
]
topology = [{name = "ring", label = "ring"}, {name = "random", degree = 2, label = "random"}]
seed = [1]
"""


@pytest.mark.usefixtures("undrawn")
def test_refused_combinations_are_listed_with_their_reasons_if_the_sweep_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "peers.toml"
    file.write_text(SWEEP)
    refused(rayfl("sweep", file, "--inline", "--dir", "all"), names=["DSGT", "column", "metropolis"])
    assert not Path("all").exists()
    listing = ["sweep", file, "--inline", "--dir", "all", "report.list_refused=true"]
    assert "refused" in rayfl(*listing, "--dry-run").output
    result = rayfl(*listing)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("all").iterdir() if path.is_dir()) == [
        "D-PSGD,random,seed=1",
        "D-PSGD,ring,seed=1",
        "DSGT,ring,seed=1",
    ]
    (listed,) = read_refused([Path("all", "D-PSGD,ring,seed=1")])
    assert listed.swept == {"case": "DSGT", "topology": "random"} and "column" in listed.why
    table = rayfl("table", "all", "--rows", "case", "--columns", "topology").output
    assert re.search(r"DSGT +\S+ +refused", table)
    line_with(table, ["refused: DSGT, random:", "metropolis"])
    # None can run.
    alone = ["sweep.topology=[{name='random', degree=2}]", "sweep.case=[{label='DSGT', method={name='dsgt', lr=0.1}}]"]
    refused(rayfl(*listing, *alone, "--dir", "none"), names=["all combinations", "DSGT"])
