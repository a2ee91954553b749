"""Every seam is tried looped and vmapped, on one worker and on several."""

import pytest

from tests.contracts.seams.ways import WAYS, Way


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]
