import math
from pathlib import Path

import numpy as np
import pytest

from rayfl.metrics.facts import ACCURACY
from rayfl.report.groups import curve, group_runs
from rayfl.report.series import cost, is_personal, last_of_clients, metric_names, series, spread
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, Run, read_run
from rayfl.run_directory.run_folder import create_run_directory


def recorded(path: Path, metrics: dict[int, list[MetricRow]], experiment: dict | None = None) -> Run:
    """A run whose round r sent r + 1 MB up and as much down and took 10 simulated seconds."""
    directory = create_run_directory(path)
    Description(experiment or {"seed": 1}).write(directory, {})
    with Recorder(directory) as recorder:
        for round, rows in metrics.items():
            recorder.round(RoundRow(round, 2, 2, 8_000_000 * (round + 1), 8_000_000 * (round + 1), 10.0, 0.5), [], rows)
    return read_run(directory)


def accuracies(*values: float) -> dict[int, list[MetricRow]]:
    return {round: [MetricRow(None, "pooled/accuracy", value)] for round, value in enumerate(values)}


def test_a_rounds_own_value_stands_and_else_the_mean_over_clients(tmp_path):
    own = [MetricRow(0, "own/accuracy", 0.25), MetricRow(1, "own/accuracy", 0.75)]
    run = recorded(tmp_path / "run", {0: [MetricRow(None, "own/accuracy", 0.9), *own], 1: [], 2: own})
    found = series(run, "own/accuracy")
    assert found is not None
    assert found.rounds.tolist() == [0, 2]
    assert found.values.tolist() == [0.9, 0.5]
    assert series(run, "pooled/accuracy") is None
    assert metric_names(run) == ["own/accuracy"]


def test_a_method_is_personal_by_its_class_or_by_the_models_that_its_run_saved(tmp_path):
    # Ditto has personal models, fedavg_ft fine-tunes before it evaluates, FedAvg does neither.
    methods = {"ditto": True, "fedavg_ft": True, "fedavg": False, "nobody's": False}
    runs = {name: recorded(tmp_path / name, accuracies(0.5), {"method": {"name": name}}) for name in methods}
    assert {name: is_personal(run) for name, run in runs.items()} == methods
    models = runs["nobody's"].directory / "models"
    models.mkdir()
    (models / "personal-0001.safetensors").touch()
    assert is_personal(runs["nobody's"])


def test_best_passes_over_nan_and_names_the_first_round(tmp_path):
    found = series(recorded(tmp_path / "run", accuracies(0.1, 0.7, math.nan, 0.7, 0.2)), "pooled/accuracy")
    assert found is not None
    assert found.best(ACCURACY) == (0.7, 1)
    assert found.final == 0.2
    none = series(recorded(tmp_path / "nan", accuracies(math.nan)), "pooled/accuracy")
    assert none is not None
    assert math.isnan(none.final)
    assert math.isnan(none.best(ACCURACY)[0])


def test_spread_is_the_quantiles_over_clients(tmp_path):
    # Of 0, 1, ..., 100 the quantile q is 100 q; the mean row of the round is no client.
    rows = [MetricRow(client, "loss", float(100 - client)) for client in range(101)]
    run = recorded(tmp_path / "run", {0: [MetricRow(0, "loss", 7.0)], 3: [MetricRow(None, "loss", 1e9), *rows]})
    found = spread(run, "loss")
    assert found is not None
    assert found.rounds.tolist() == [0, 3]
    assert found.quantiles[:, 0].tolist() == [7.0] * 5
    assert found.quantiles[:, 1].tolist() == pytest.approx([10, 25, 50, 75, 90])
    assert sorted(last_of_clients(run, "loss")[1].tolist()) == list(range(101))
    assert spread(recorded(tmp_path / "global", accuracies(0.5)), "pooled/accuracy") is None


def test_cost_counts_up_to_and_including_a_round(tmp_path):
    run = recorded(tmp_path / "run", {0: [], 2: [], 3: []})
    # Both ways 2 (r + 1) MB: 2, 6 and 8 in rounds 0, 2 and 3; round 1 was not recorded and costs nothing.
    found = cost(run).at(np.array([-1, 0, 1, 2, 3, 9]))
    assert found.total_megabytes.tolist() == [0, 2, 2, 8, 16, 16]
    assert found.total_uplink_megabytes.tolist() == [0, 1, 1, 4, 8, 8]
    assert found.total_simulated_s.tolist() == [0, 10, 10, 20, 30, 30]


def test_seeds_are_grouped_and_averaged_over_the_rounds_they_share(tmp_path):
    method = {"name": "fedpse", "keep_ratio": 0.1}
    runs = [
        recorded(tmp_path / f"pse-seed{seed}", accuracies(*values), {"seed": seed, "method": method})
        for seed, values in ((1, (0.1, 0.4, 0.9)), (2, (0.3, 0.8)))
    ]
    other = recorded(tmp_path / "other", accuracies(0.5), {"seed": 1, "method": {**method, "keep_ratio": 0.2}})
    found = group_runs([runs[0], other, runs[1]])
    assert [(group.label, group.seeds) for group in found] == [("pse", [1, 2]), ("other", [1])]
    mean = curve(found[0], "pooled/accuracy")
    assert mean is not None
    assert mean.cost.round.tolist() == [0, 1]
    assert mean.mean.tolist() == pytest.approx([0.2, 0.6])
    # Sample standard deviation of a and b is |a - b| / sqrt(2).
    assert mean.deviation.tolist() == pytest.approx([0.2 / math.sqrt(2), 0.4 / math.sqrt(2)])
    assert mean.cost.total_megabytes.tolist() == [2, 6]
    assert mean.cost.total_simulated_s.tolist() == [10, 20]
    alone = curve(found[1], "pooled/accuracy")
    assert alone is not None
    assert alone.deviation.tolist() == [0]


def test_a_seed_run_twice_is_not_two_draws_and_labels_are_unique(tmp_path):
    runs = [recorded(tmp_path / name / "run", accuracies(0.5), {"name": "demo", "seed": 1}) for name in "abc"]
    found = group_runs(runs)
    assert [len(group.runs) for group in found] == [1, 1, 1]
    assert [group.label for group in found] == ["demo", "demo (run)", "demo (run)'"]


def test_groups_of_one_name_are_told_apart_by_the_settings_they_all_have(tmp_path):
    def named(place: str, model: dict, per_round: int) -> Run:
        experiment = {"label": "FedAdam", "seed": 1, "model": model, "clients": {"per_round": per_round}, "rounds": 3}
        return recorded(tmp_path / place, accuracies(0.5), experiment)

    runs = [named("a", {"name": "logistic"}, 100), named("b", {"name": "convnet2", "hidden": 84}, 10)]
    found = [group.label for group in group_runs(runs)]
    assert found == ["FedAdam (logistic, per_round=100)", "FedAdam (convnet2, per_round=10)"]
    # Those of the first two that differ in nothing are told apart by where they lie.
    again = [group.label for group in group_runs([*runs, named("c", {"name": "logistic"}, 100)])]
    assert again == [*found, "FedAdam (c)"]


def test_a_metric_that_one_seed_lacks_has_no_curve(tmp_path):
    runs = [
        recorded(tmp_path / "a", accuracies(0.5), {"seed": 1}),
        recorded(tmp_path / "b", {0: [MetricRow(None, "own/accuracy", 0.5)]}, {"seed": 2}),
        recorded(tmp_path / "c", {7: [MetricRow(None, "pooled/accuracy", 0.5)]}, {"seed": 3}),
    ]
    assert curve(group_runs(runs[:2])[0], "pooled/accuracy") is None
    # No round in common.
    assert curve(group_runs([runs[0], runs[2]])[0], "pooled/accuracy") is None
