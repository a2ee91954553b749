"""What the tests of wrappers share."""

import pytest

from tests.wrappers.every_wrapper import Later, Recorder


@pytest.fixture(autouse=True)
def nothing_seen():
    Recorder.seen.clear()
    Later.seen.clear()
