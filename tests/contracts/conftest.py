"""Pools of client actors for the contract tests."""

from collections.abc import Iterator

import pytest

from rayfl.methods.compressed.lag import LAG
from tests.contracts.actors import SharedActors
from tests.contracts.seams.quadratic import setup


@pytest.fixture(scope="package")
def three_actors(cluster: None) -> Iterator[SharedActors]:
    pool = SharedActors(setup(LAG), 3)
    yield pool
    pool.close()
