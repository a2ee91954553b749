"""Every test process does its numbers like every other process of rayfl; tests on Ray share one local cluster.

Under pytest-xdist (`-n 3 --dist loadfile`) one process takes all tests on Ray, before any other test, and every other
file goes to one process, so that what the tests of a file share is made once.
"""

from rayfl.determinism.process import prepare_process

prepare_process()

import functools  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

# Ray gives its workers the least priority but four, and the other test processes would keep actors from starting.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (so Ray spells it)

ON_RAY = "rayfl/on_ray"
"""Where pytest's cache holds the names of the tests on Ray: the processes collect tests, and another one deals them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests on Ray first: they take longest, and leave cores idle while processes start."""
    on_ray = [item for item in items if needs_ray(item)]
    chosen = set(on_ray)
    items[:] = [*on_ray, *(item for item in items if item not in chosen)]
    if hasattr(config, "workerinput") and config.cache is not None:
        config.cache.set(ON_RAY, [item.nodeid for item in on_ray])


def needs_ray(item: pytest.Item) -> bool:
    """Whether a test says so, or has the cluster (the fixture, and not an argument of that name)."""
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return bool(item.get_closest_marker("ray")) or "cluster" in set(getattr(item, "fixturenames", ())) - set(given)


@pytest.hookimpl(optionalhook=True)
# Any: the types of xdist, which a run in one process does without.
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """The scheduler of `--dist loadfile`, but that all tests on Ray go to one process.

    xdist's own groups (`--dist loadgroup`) do nothing under pytest 9.2: pytest-dev/pytest-xdist#1386.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class FilesAndRay(LoadFileScheduling):
        @functools.cached_property
        def on_ray(self) -> set[str]:
            return set(config.cache.get(ON_RAY, []))

        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid in self.on_ray else super()._split_scope(nodeid)

    # In the order of collection, the tests on Ray first.
    config.option.loadscopereorder = False
    return FilesAndRay(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """What a test computes depends neither on the number of cores nor on who else uses them."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray of 4 cores and 1 GPU, started as rayfl starts its own. Cores and GPU are counted, not there, so
    placement can be tested on any machine."""
    import ray

    from actors import access, fork_server

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray puts sockets below this folder, and the path of a socket has at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    with access.private(), fork_server.serving() as server:
        with fork_server.lean_nodes(server):
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
