"""Pages, tables and targets read unit, range and direction from the run's metrics.json, also of a stranger's metric."""

import json
from pathlib import Path

import numpy as np
import pytest

from jobs.reporting import result_table
from rayfl.errors import RayflError
from rayfl.metrics.facts import ACCURACY, LOSS, PLACES, Facts
from rayfl.metrics.fairness import facts_over_clients, fairness
from rayfl.report import wording
from rayfl.report.groups import choose, facts_of, group_runs, in_words, over, ranked_names
from rayfl.report.numbers import costs_to_target, targets
from rayfl.report.page import report
from rayfl.report.page_tables import fairness_of
from rayfl.report.summary import summary
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory.description import Description, write_metric_facts
from rayfl.run_directory.record import Recorder, Run, read_run
from rayfl.run_directory.run_folder import create_run_directory
from tests.refusals import refused

ERROR = Facts(title="Distance", meaning="The distance", unit="km", low=0.0, higher_is_better=False, ranks=True)


def run(directory: Path, values: list[float | None], lr: float = 0.1) -> Run:
    """A run with a metric that falls, of the round and of three clients; client 2's is never defined."""
    Description({"name": "run", "seed": 1, "method": {"lr": lr}}).write(create_run_directory(directory), {})
    with Recorder(directory) as recorder:
        write_metric_facts(directory, {"distance": ERROR})
        for round, value in enumerate(values):
            clients = [None if client == 2 or value is None else value * (1 + client) for client in range(3)]
            rows = [MetricRow(None, "pooled/distance", value)]
            rows += [MetricRow(client, "own/distance", one) for client, one in enumerate(clients)]
            recorder.round(RoundRow(round, 1, 1, 8_000_000, 0, 2.0, 1.0), [], rows)
    return read_run(directory)


def test_a_metric_that_falls_ranks_the_smallest_first_and_reaches_targets_from_above(tmp_path: Path):
    near, far = run(tmp_path / "near", [9.0, 2.0, 4.0]), run(tmp_path / "far", [9.0, 8.0, 7.0], lr=0.2)
    found = group_runs([far, near])
    assert ranked_names(found) == ["pooled/distance", "own/distance"]
    numbers = summary(near)
    assert numbers["best"]["pooled/distance"] == {"value": 2.0, "round": 1}
    assert numbers["units"]["pooled/distance"] == "km"
    missed, reached = costs_to_target(found, "pooled/distance", 4.5)["rounds"]
    assert (missed.count, reached.count, reached.mean) == (0, 1, 2)
    assert "not reached (best 7 km)" in str(targets(found, "pooled/distance", 4.5, 1)["rows"])
    (choice,) = choose(found, ["method.lr"], "pooled/distance", 1)
    assert choice.winner.runs[0].directory == near.directory
    html = report([far.directory, near.directory], tmp_path / "page.html").read_text(encoding="utf-8")
    rows = html.partition('<h2 id="runs">')[2].partition("</table>")[0]
    assert "5.000 km" in rows and rows.index("5.000 km") < rows.index("8.000 km")
    # A table over clients has a unit in its title, once.
    over_clients = html.partition('<h2 id="fairness">')[2].partition("<h2")[0]
    assert "(km)" in over_clients and " km" not in over_clients


def test_the_numbers_of_a_private_run_say_epsilon_and_delta(tmp_path: Path):
    wrap = [{"name": "attack"}, {"name": "central-dp", "delta": 1e-6}]
    directory = create_run_directory(tmp_path / "run")
    Description({"name": "run", "seed": 1, "wrap": wrap}).write(directory, {})
    with Recorder(directory) as recorder:
        for round, spent in enumerate((1.5, 2.25)):
            recorder.round(RoundRow(round, 1, 1, 0, 0, 1.0, 1.0), [], [MetricRow(None, "privacy/epsilon", spent)])
    numbers = summary(read_run(directory))
    assert numbers["privacy"] == {"epsilon": 2.25, "delta": 1e-6}
    cells = [list(column.cells) for column in result_table(numbers).columns]
    assert [str(value) for name, value in zip(*cells, strict=True) if "privacy" in str(name)] == ["2.25", "1e-06"]


def test_what_is_undefined_is_left_out_and_counted(tmp_path: Path):
    one = run(tmp_path / "one", [9.0, None, 4.0])
    assert one.metrics["value"].null_count == 1 + 4 + 1
    found = fairness_of(one)
    # Clients 0 and 1 have 4 and 8; the larger is worse.
    wanted = {"mean": 6.0, "deviation": 2.0, "worst_tenth": 8.0, "worst": 8.0, "best": 4.0, "difference": 4.0}
    assert found == {"own/distance": pytest.approx({**wanted, "jain": 144 / (2 * 80), "left_out": 1.0})}
    assert summary(one)["final"] == {"pooled/distance": 4.0, "own/distance": 6.0}
    assert report([one.directory], tmp_path / "page.html").is_file()


def test_jains_index_and_the_worst_tenth():
    found = fairness(np.array([0.5, 1.0, 0.75]), ACCURACY)
    assert found["jain"] == pytest.approx(0.93103, abs=5e-6)
    assert [found[name] for name in ("mean", "worst", "best", "difference")] == [0.75, 0.5, 1.0, 0.5]
    assert found["deviation"] == pytest.approx(np.std([0.5, 1.0, 0.75]))
    # Of 11 clients the worst tenth are two; a client without a value is none of them.
    assert fairness(np.array([*range(11), np.nan]), ACCURACY)["worst_tenth"] == 0.5
    assert fairness(np.zeros(4), LOSS)["jain"] == 1.0
    assert "jain" not in fairness(np.array([-1.0, 1.0]), LOSS)
    assert fairness(np.array([np.nan]), ACCURACY) == {}


def test_facts_over_clients_and_their_words():
    jain, worst = (facts_over_clients(f"own_{word}", ERROR) for word in ("jain", "worst"))
    assert (jain.unit, jain.low, jain.high, jain.higher_is_better) == ("", 0.0, 1.0, True)
    assert worst == ERROR == facts_over_clients("own", ERROR)
    deviation = facts_over_clients("own_after_training_deviation", ACCURACY)
    assert (deviation.unit, deviation.high, deviation.higher_is_better) == ("%", None, False)
    assert wording.title("own_worst_tenth/distance", ERROR).startswith("Distance: Own test data")
    assert "worst 10 %" in wording.title("own_worst_tenth/distance", ERROR)
    assert wording.PLACES.keys() == {*PLACES}


def test_a_run_from_before_has_accuracy_and_loss_and_a_damaged_file_is_named(tmp_path: Path):
    one = run(tmp_path / "one", [1.0])
    path = one.directory / "metrics.json"
    path.unlink()
    assert read_run(one.directory).facts == {"loss": LOSS, "accuracy": ACCURACY}
    for damaged in ("{", '{"distance": 3}', json.dumps({"distance": {"title": 3}})):
        path.write_text(damaged)
        with refused(names=[path, "cannot be read"], error=RayflError):
            read_run(one.directory)


def test_values_in_words():
    assert in_words(over([0.5, 0.25]), ACCURACY).startswith("37.5")
    assert in_words(over([123.456]), ERROR, counted=False) == "123.5 km"
    assert in_words(over([0.00123456]), ERROR, counted=False) == "0.001235 km"
    assert facts_of([], "x") == Facts(title="x")


def test_a_list_of_classes_is_shown_by_their_names_and_options():
    found = ({"name": "accuracy"}, {"name": "files/plugin-1a.py:Brier", "temperature": 1.0}, {"name": "top-k", "k": 3})
    assert wording.value(found) == "accuracy, Brier (temperature 1), top-k (k 3)"
