"""Every seam is tried looped and vmapped, on one worker and on several, in this process and in actors."""

import pytest

from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.executors import Shuffled
from tests.contracts.seams.ways import Way


@pytest.fixture(params=["loop", "vmap", "three workers", pytest.param("ray", marks=pytest.mark.ray(shared=True))])
def way(request: pytest.FixtureRequest) -> Way:
    if request.param == "ray":
        return Way("loop", request.getfixturevalue("three_actors").take)
    engine = "vmap" if request.param == "vmap" else "loop"
    return Way(engine, Shuffled if request.param == "three workers" else InlineExecutor)
