"""Figures of clients that keep a share of the model, from a real run of Dis-PFL on digits."""

import re

import numpy as np
import pytest

from rayfl.experiment.prepare import prepare
from rayfl.report.drawn_figures import _picture, mask_section
from rayfl.report.figures import _by_retention, sections
from rayfl.report.groups import group_runs
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.description import Description
from rayfl.run_directory.play_run import RunOutput, play_run
from rayfl.run_directory.record import read_run
from rayfl.run_directory.run_folder import create_run_directory
from tests.contracts.every_method import experiment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = create_run_directory(tmp_path_factory.mktemp("runs") / "dispfl")
    options = {"evaluation": {"every": 1, "masks": True}, "clients": {"retention_ratio": [0.2, 0.5]}}
    here = prepare(experiment("dispfl", rounds=1, **options))
    Description({"name": "dispfl", "seed": 1}).write(directory, {})
    play_run(here, InlineExecutor(here), RunOutput(directory))
    return read_run(directory)


def test_distances_and_masks_of_a_run_are_drawn(run):
    found = {section.title: section for section in sections(group_runs([run]), ["own/accuracy"])}
    strip, *drawn = found["Masks"].figures
    (row,) = strip.chart["data"]["values"]
    # A value for each ordered pair of clients.
    count = len(run.clients["client"].unique())
    assert len(row["value"]) == count * (count - 1) and all(0 <= value <= 1 for value in row["value"])
    assert "correlation" in found["Masks"].intro
    assert len(drawn) == 4 and re.match(r"Client 0: \d+\.\d% of ", drawn[0].title)
    others = [figure.title for figure in found["Training and other measurements"].figures]
    assert not any("mask" in title.lower() for title in others)


def test_a_damaged_model_file_costs_the_drawn_masks_alone(run):
    path = run.directory / "models" / "personal.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    try:
        assert len(mask_section(group_runs([run])).figures) == 1
    finally:
        path.write_bytes(whole)


def test_kernels_stand_side_by_side_with_blanks_between():
    mask = np.zeros((2, 1, 2, 2), dtype=bool)
    mask[0, 0, 0, 1] = mask[1, 0, 1, 0] = True
    assert np.nan_to_num(_picture(mask), nan=7).tolist() == [[0, 1, 7, 0, 0], [0, 0, 7, 1, 0]]


def test_accuracy_by_retention_ratio(run):
    (figure,) = _by_retention(group_runs([run]), ["own/accuracy"])
    (row,) = figure.chart["data"]["values"]
    assert row["Retention ratio"] == [0.2, 0.5]
    assert _by_retention(group_runs([run]), ["pooled/accuracy"]) == []
