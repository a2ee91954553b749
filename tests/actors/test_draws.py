"""Models that draw from global generators, on Ray's actors: the bits of one process."""

from pathlib import Path

import pytest

from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.play_run import Listener, RunOutput, play_run
from tests.actors.toys import assert_same_run, experiment, play_on_ray

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

DRAWING = """
import random

import numpy as np
import torch
from torch import nn

AT_IMPORT = np.random.rand()


class Drawing(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        size = int(np.prod(input_shape))
        self.head, self.kept = nn.Linear(size, num_classes), random.sample(range(size), size // 2)

    def forward(self, inputs):
        hidden = inputs.flatten(1)
        hidden = hidden * torch.zeros(hidden.shape[1]).index_fill(0, torch.tensor(self.kept), AT_IMPORT)
        if self.training and len(inputs) > 2:
            hidden = hidden + torch.randn_like(hidden) + np.random.rand() + random.random()
        return self.head(hidden)
"""


def test_models_that_draw_have_the_bits_of_one_process_on_actors(tmp_path: Path):
    (tmp_path / "drawing.py").write_text(DRAWING)
    chosen = experiment(rounds=2, model=f"{tmp_path}/drawing.py:Drawing", runtime={"actors": 2})
    setup = prepare(chosen)
    for name in ("ray", "inline"):
        (tmp_path / name).mkdir()
    assert play_on_ray(chosen, setup, tmp_path / "ray", Listener())
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "inline"))
    assert_same_run(tmp_path / "ray", tmp_path / "inline")
