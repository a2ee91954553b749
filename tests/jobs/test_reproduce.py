"""`rayfl reproduce`: a folder's sweeps are run once, its claims get verdicts, and mistakes are found before that."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jobs.reproduce import PAPERS, TUNING, paper_folder, read_paper
from rayfl.run_directory.record import read_run
from rayfl.settings import dotted
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused

SWEEP = """
name = "small"
rounds = 4
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "fedavg", lr = 0.1, steps = 1}
evaluation = {own = false}
runtime = {executor = "inline"}
output = {report = false, save_models = false}

[sweep]
seed = [1, 2, 3]
method.lr = [0.001, 0.1]
"""
CLAIMS = """
paper = "A small paper"
written = 2026-01-02
smallest = { "%" = 0.001 }

[quick]
rounds = 2
sweep.seed = [1, 2]
method.steps = 2
rates.method.batch_size = 9
rates.clients.count = 3

[[claim]]
id = "larger-rate"
says = "Section 1: a larger rate is better."
sweep = "rates"
value = "pooled/accuracy:final"
better = {method.lr = 0.1}
than = {"method.lr" = 0.001}
size = 0.5

[[claim]]
id = "same-bytes"
says = "Table 1: it costs nothing."
sweep = "rates"
value = "megabytes"
source = "ours"
order = [{method.lr = 0.1}, {method.lr = 0.001}]
sign = "="
margin = 0.0

[[claim]]
id = "more-clients"
says = "Figure 1: more clients send more."
sweep = "clients"
value = "megabytes"
trend = "clients.count"
"""


@pytest.fixture
def paper(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "rates.toml").write_text(SWEEP)
    (folder / "clients.toml").write_text(SWEEP.replace("method.lr = [", "clients.count = [2, 4, 8] #"))
    (folder / "tune-rates.toml").write_text(SWEEP.replace("[1, 2, 3]", "[100]"))
    (folder / "claims.toml").write_text(CLAIMS)
    return folder


def test_every_claim_gets_a_verdict_and_nothing_runs_twice(paper):
    result = rayfl("reproduce", "paper", "--dir", "out")
    assert result.exit_code == 0, result.output
    line_with(result.output, ["verdicts", Path("out/verdicts.md").absolute()])
    line_with(result.output, ["larger-rate", "3", "reproduced"])
    assert sorted(path.name for path in Path("out").iterdir()) == [
        *("claims.sha256", "clients", "pairs.csv", "rates", "verdicts.csv", "verdicts.md")
    ]
    found = pd.read_csv("out/verdicts.csv").set_index("claim")
    assert found["verdict"].to_dict() == {
        "larger-rate": "reproduced",
        "same-bytes": "reproduced",
        "more-clients": "constant",
    }
    pairs = pd.read_csv("out/pairs.csv")
    firsts, claims = np.array(pairs["first"]), np.array(pairs["claim"])
    means = {claim: firsts[claims == claim].mean() for claim in ("more-clients", "larger-rate")}
    # 650 numbers of 32 bits down, and as many and a count of 64 bits up, from each client in each of four rounds.
    assert means["more-clients"] == pytest.approx(4 * (2 * 32 * 650 + 64) / 8e6)
    ends = [read_run(Path(f"out/rates/seed={seed},lr=0.1")).metrics.to_pandas() for seed in (1, 2, 3)]
    ends = [one[(one["name"] == "pooled/accuracy") & (one["round"] == 3)]["value"].item() for one in ends]
    assert means["larger-rate"] == pytest.approx(sum(ends) / 3)
    text = Path("out/verdicts.md").read_text()
    for words in (
        "A small paper",
        "15 of 15 runs",
        "Seeds 1, 2, 3",
        "2026-01-02",
        "1 reproduced",
        "[3](rates/seed%3D3%2Clr%3D0.1/)",
    ):
        assert words in text
    # Three numbers of clients are an axis of a table and of a chart.
    (table,) = re.findall(r"^## clients: .*\n\n.*\n\n(\|(?:.*\n)+)", text, flags=re.MULTILINE)
    assert re.findall(r"^\| (\d)", table, flags=re.MULTILINE) == ["2", "4", "8"]
    assert {".svg", ".pdf", ".csv", ".tex"} == {path.suffix for path in Path("out/clients/figures").iterdir()}

    written = {path: path.stat().st_mtime_ns for path in Path("out").rglob("records/*")}
    assert rayfl("reproduce", "paper", "--dir", "out").exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("records/*")} == written
    # Settings of the same runs must stay; more seeds are more runs.
    refused(rayfl("reproduce", "paper", "--dir", "out", "rounds=5"), names=["rounds", "4", "5"])
    assert rayfl("reproduce", "paper", "--dir", "out", "sweep.seed=[1, 2, 3, 4]", "--only", "rates").exit_code == 0
    assert pd.read_csv("out/pairs.csv").groupby("claim", sort=False)["first"].count().tolist() == [4, 4, 3]
    # What --only leaves out may be of other settings, or lack its data. It has no verdict then.
    (paper / "clients.toml").write_text(
        SWEEP.replace("method.lr = [", "clients.count = [2, 4, 9] #").replace("steps = 1", "steps = 2")
    )
    result = rayfl("reproduce", "paper", "--dir", "out", "--only", "rates")
    assert result.exit_code == 0, result.output
    assert pd.read_csv("out/verdicts.csv")["verdict"].tolist() == ["reproduced", "reproduced", "not run"]
    # A claim that changes after its verdict starts anew.
    (paper / "claims.toml").write_text(CLAIMS.replace("size = 0.5", "size = 0.4"))
    refused(
        rayfl("reproduce", "paper", "--dir", "out", "--only", "rates"), names=["out", "hash", "--dir", "sweep.seed"]
    )


def test_a_table_that_cannot_be_made_costs_no_verdict(paper):
    (paper / "rates.toml").write_text(SWEEP + "[[report.tables]]\nrows = 'method.lr'\nvalues = ['own/acuracy']\n")
    result = rayfl("reproduce", "paper", "--dir", "out", "--only", "rates")
    assert result.exit_code == 0, result.output
    text = Path("out/verdicts.md").read_text()
    assert "1 reproduced" in text and "no run has the number 'own/acuracy'" in text


def test_quick_changes_all_sweeps_or_one_and_the_user_has_the_last_word(paper):
    result = rayfl("reproduce", paper, "--quick", "--only", "rates", "rounds=1")
    assert result.exit_code == 0, result.output
    home = Path("runs/reproduce-paper-quick")
    assert [path.name for path in home.iterdir() if path.is_dir()] == ["rates"]
    run = read_run(home / "rates" / "seed=2,lr=0.1")
    settings = dotted(run.experiment)
    assert [settings[key] for key in ("clients.count", "method.steps", "method.batch_size")] == [3, 2, 9]
    assert len(run.rounds) == 1
    assert not (home / "rates" / "seed=3,lr=0.1").exists()
    # Too few rounds for a verdict on the paper.
    assert {*pd.read_csv(home / "verdicts.csv")["verdict"]} == {"no verdict", "not run"}
    assert "quick" in (home / "verdicts.md").read_text() and "without verdicts" in result.output


def test_tuning_runs_only_by_its_name(paper):
    result = rayfl("reproduce", paper, "--only", "tune-rates", "--dir", "out")
    assert result.exit_code == 0, result.output
    assert [path.name for path in Path("out").iterdir() if path.is_dir()] == ["tune-rates"]


def test_a_paper_that_comes_with_rayfl_runs_quickly_on_the_data_that_come_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The partition is swept elsewhere, which does not matter.
    digits = ("data=digits", "clients.count=10", "clients.per_round=5", "splits.heldout_ratio=0.1", "partition=iid")
    result = rayfl("reproduce", "elastic", "--quick", "--only", "hosts", "--dir", "out", *digits)
    assert result.exit_code == 0, result.output
    found = pd.read_csv("out/verdicts.csv").set_index("sweep")
    assert set(found.loc["hosts", "verdict"]) == {"no verdict"}
    assert set(found.drop("hosts")["verdict"]) == {"not run"}
    # Elastic aggregation changes the update of every host, and its mean step each of these.
    pairs = pd.read_csv("out/pairs.csv")
    assert any(first != second for first, second in zip(pairs["first"], pairs["second"], strict=True))


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("than =", "then =", ["then", "than"]),
        ('sweep = "clients"', 'sweep = "client"', ["more-clients", "client", "clients"]),
        ("0.001}\nsize", "0.01}\nsize", ["larger-rate", "method.lr='0.01'", "0.001"]),
        ('trend = "clients.count"', 'trend = "count"', ["more-clients", "count", "clients.count"]),
        ('paper = "A small paper"', "", ["claims.toml", "paper"]),
        ("[quick]", "[quik]", ["claims.toml", "quik", "quick"]),
        (CLAIMS.partition("[[claim]]")[2], "", ["claims.toml", "claim"]),
    ],
)
def test_a_wrong_claim_is_refused_before_anything_runs(paper, old, new, names):
    assert CLAIMS.count(old) == 1
    (paper / "claims.toml").write_text(CLAIMS.replace(old, new))
    refused(rayfl("reproduce", "paper"), names=names)
    assert not Path("runs").exists()


def test_other_mistakes_are_refused_before_anything_runs(paper):
    refused(rayfl("reproduce", "elastc"), names=["elastc", "claims.toml", "'elastic'"])
    refused(rayfl("reproduce", "paper", "--only", "rate"), names=["--only rate", "'rates'"])
    refused(rayfl("reproduce", "paper", "sweep.seed=[1]"), names=["larger-rate", "rates", "sweep.seed"])
    (paper / "clients.toml").write_text(SWEEP.partition("[sweep]")[0])
    refused(rayfl("reproduce", "paper"), names=["clients.toml", "[sweep]"])
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", sorted(path.name for path in PAPERS.iterdir() if path.is_dir()))
def test_the_claims_that_come_with_rayfl_fit_their_sweeps(name):
    folder = paper_folder(Path(name))
    tuning = [path.stem for path in folder.glob(f"{TUNING}*.toml")]
    for quick in (False, True):
        paper, sweeps = read_paper(folder, quick, only=tuning)
        assert paper.claim and all(one.says for one in paper.claim) and set(tuning) <= set(sweeps)
        # Whoever repeats one needs no Ray.
        experiments = [one.experiment for combinations in sweeps.values() for one in combinations]
        assert {one.runtime.executor for one in experiments} == {"inline"}
