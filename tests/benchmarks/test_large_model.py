"""The benchmark of one large model, with a small one."""

import sys

from benchmarks.large_model import ACTOR, BUILDS, COORDINATOR, PLAYS, large, watched
from rayfl import tree
from rayfl.experiment.prepare import prepare
from tests.benchmarks.commands import benchmark
from tests.refusals import refused


def test_the_model_has_about_the_parameters_that_are_asked_for():
    chosen, size = large(60_000)
    assert tree.num_bytes(prepare(chosen).initial_arrays) == size
    assert 0.98 < size / 4 / 60_000 < 1.02


def test_a_process_is_watched_and_no_actor_found():
    # Time for several looks.
    most = watched([sys.executable, "-c", "import time; held = bytearray(b'1') * 100_000_000; time.sleep(1)"])
    assert 100e6 < most[BUILDS] < 200e6
    assert most[PLAYS] == most[COORDINATOR] == most[ACTOR] == 0


def test_what_cannot_be_measured_is_refused():
    refused(benchmark("scale", "--parameters", 100), names=["--parameters=100"])
    refused(benchmark("scale", "--parameters", 10**6, "--nodes", 2), names=["--parameters"])
