"""Every test process does its numbers like every other process of rayfl; tests on Ray share one local cluster."""

from rayfl.determinism.process import prepare_process

prepare_process()

import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray of 4 cores and 1 GPU. Both are counted, not there, so placement can be tested on any machine."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray puts sockets below this folder, and the path of a socket has at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    ray.init(
        address="local",
        include_dashboard=False,
        _temp_dir=folder,
        log_to_driver=False,
        num_cpus=4,
        num_gpus=1,
        object_store_memory=300 * 10**6,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
