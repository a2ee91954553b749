"""The distance of saved models, and the bytes of the busiest client."""

import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from rayfl.report.groups import group_runs
from rayfl.report.numbers import number
from rayfl.report.series import consensus_distance
from rayfl.rounds.ledger import ClientRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, Run, read_run
from rayfl.run_directory.run_folder import create_run_directory


@pytest.fixture
def run(tmp_path) -> Run:
    """Two rounds of three peers, of which peer 1 sends and receives the most."""
    directory = tmp_path / "run"
    Description({"name": "run", "seed": 1}).write(create_run_directory(directory), {})
    with Recorder(directory) as recorder:
        for round_number in range(2):
            clients = [
                ClientRow(peer, "delivered", megabytes * 8_000_000, 8_000_000, 1, 1, 1.0)
                for peer, megabytes in enumerate((1, 5, 2))
            ]
            recorder.round(RoundRow(round_number, 3, 3, 64_000_000, 24_000_000, 2.0, 1.0), clients, [])
    return read_run(directory)


def test_the_busiest_client_is_that_with_the_most_bytes_in_both_directions(run):
    assert number("busiest_megabytes", group_runs([run])).read(run) == 2 * (5 + 1)


@pytest.mark.parametrize(
    ("models", "distance"),
    [
        # Their mean is (1, 1): squares 2, 2 and 0.
        ({"0/w": [0.0, 0.0], "1/w": [2.0, 2.0], "2/w": [1.0, 1.0], "constants/c": [9.0]}, math.sqrt(4 / 3)),
        ({"0/w": [3.0], "0/b": [1.0], "1/w": [3.0], "1/b": [5.0]}, 2.0),
        ({"0/w": [3.0], "1/w": [3.0]}, 0.0),
        ({"0/w": [3.0]}, math.nan),
        ({"0/w": [3.0], "1/v": [3.0]}, math.nan),
        ({"0/w": [3.0], "1/w": [3.0, 4.0]}, math.nan),
        ({}, math.nan),
    ],
)
def test_the_distance_of_models_is_the_root_of_their_mean_squared_distance_to_the_mean(run, models, distance):
    (run.directory / "models").mkdir()
    if models:
        arrays = {name: np.array(values, dtype=np.float32) for name, values in models.items()}
        save_file(arrays, run.directory / "models" / "personal.safetensors")
    assert consensus_distance(run) == pytest.approx(distance, nan_ok=True)
