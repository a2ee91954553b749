"""Figures of clients that keep a share of the model, from a real run of Dis-PFL on digits."""

import re

import numpy as np
import pytest

from rayfl.experiment.prepare import prepare
from rayfl.report.mask_figures import _picture, by_retention, mask_section
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


def test_masks_of_one_run_are_compared_and_drawn(run):
    section = mask_section(groups([run]))
    headings = [figure.title for figure in section.figures]
    assert headings[:2] == ["Likeness of labels", "Distance of masks"] and len(headings) == 2 + 4
    assert re.match(r"Client 0: \d+\.\d% of ", headings[2])
    assert "correlation" in section.intro

    assert all(set(figure.chart.rows) == {"value"} for figure in section.figures)


def test_accuracy_by_retention_ratio(run):
    (figure,) = by_retention(groups([run]), ["own/accuracy"])
    assert figure.title == "By retention ratio: Own test data, after the exchange"
    assert by_retention(groups([run]), ["pooled/accuracy"]) == []


def test_a_damaged_model_file_leaves_the_rest(run):
    path = run.directory / "models" / "personal.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    try:
        assert len(mask_section(groups([run])).figures) == 2
    finally:
        path.write_bytes(whole)


def test_kernels_stand_side_by_side_with_blanks_between():
    mask = np.zeros((2, 1, 2, 2), dtype=bool)
    mask[0, 0, 0, 1] = mask[1, 0, 1, 0] = True
    assert np.nan_to_num(_picture(mask), nan=7).tolist() == [[0, 1, 7, 0, 0], [0, 0, 7, 1, 0]]
