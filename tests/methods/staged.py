"""The batches of a stage of its own, which a method's reference goes through in the same order."""

import numpy as np

from rayfl.data.batches import schedule
from rayfl.determinism import seeding
from rayfl.rounds.setup import Setup


def stage_batches(here: Setup, round: int, client: int, stage: str, epochs: int, batch_size: int) -> list[np.ndarray]:
    """Rows of the dataset, a batch a step."""
    rows = here.partition.train[client]
    generator = seeding.generator(here.seed, round, client, f"train/{stage}/batches")
    plan = schedule(len(rows), epochs=epochs, steps=None, batch_size=batch_size, generator=generator)
    return [rows[chosen] for chosen in plan]
