"""Figures of clients that keep a share of the model, from a real run of Dis-PFL on digits."""

import pytest

from rayfl.experiment.prepare import prepare
from rayfl.report.figures import _by_retention, sections
from rayfl.report.series import groups
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.description import describe_run
from rayfl.run_directory.play_run import play_run
from rayfl.run_directory.record import read_run
from rayfl.run_directory.run_folder import create_run_directory
from tests.contracts.every_method import experiment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = create_run_directory(tmp_path_factory.mktemp("runs") / "dispfl")
    options = {"evaluation": {"every": 1, "masks": True}, "clients": {"retention_ratio": {"groups": [0.2, 0.5]}}}
    here = prepare(experiment("dispfl", rounds=1, **options))
    describe_run(directory, {"name": "dispfl", "seed": 1}, {}, "")
    play_run(here, InlineExecutor(here), directory, lambda record: None)
    return read_run(directory)


def test_distances_of_masks_are_drawn_and_correlated(run):
    found = {section.title: section for section in sections(groups([run]), ["own/accuracy"])}
    (figure,) = found["Masks"].figures
    (row,) = figure.chart["data"]["values"]
    # A value for each ordered pair of clients.
    clients = run.clients["client"].unique()
    assert len(row["value"]) == len(clients) * (len(clients) - 1) and all(0 <= value <= 1 for value in row["value"])
    assert "correlation" in found["Masks"].intro
    others = [figure.title for figure in found["Training and other measurements"].figures]
    assert not any("mask" in title.lower() for title in others)


def test_accuracy_by_retention_ratio(run):
    (figure,) = _by_retention(groups([run]), ["own/accuracy"])
    (row,) = figure.chart["data"]["values"]
    assert row["Retention ratio"] == [0.2, 0.5]
    assert _by_retention(groups([run]), ["pooled/accuracy"]) == []
