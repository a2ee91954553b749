"""Set up test processes as rayfl sets up its own, and share one local Ray among the tests that use it.

Under pytest-xdist (`-n 3 --dist loadfile`) the tests on Ray come first: one process takes all tests on the shared Ray,
and the tests of a file that start a Ray themselves go to one process. Every other file goes to one process too, so that
its tests share their fixtures.
"""

from rayfl.determinism.process import prepare_process

prepare_process()

import signal  # noqa: E402

from tests import machine, method_seconds  # noqa: E402

GUARD = machine.Guard()
# A shell starts what it puts in the background with SIGINT ignored, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import atexit  # noqa: E402
import contextlib  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
from _pytest.terminal import TerminalReporter  # noqa: E402

# Ray gives its workers the least priority but four, and the other test processes would keep actors from starting.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (so Ray spells it)

atexit.register(GUARD.end)

ON_RAY = "rayfl/on_ray"
"""Where pytest's cache holds the scopes of tests on Ray: the processes collect tests, another one deals them."""

SHARED = "shared ray"
"""The scope of the tests on the shared Ray."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests on Ray first: they take longest, and leave cores idle while processes start."""
    on_ray = {item.nodeid: scope for item in items if (scope := ray_scope(item))}
    items.sort(key=lambda item: (item.nodeid not in on_ray, on_ray.get(item.nodeid) != SHARED))
    if hasattr(config, "workerinput") and getattr(config, "cache", None) is not None:
        config.cache.set(ON_RAY, on_ray)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the tests themselves: they and all modules stay until the process ends."""
    gc.freeze()


def ray_scope(item: pytest.Item) -> str:
    """Return SHARED for a test on the shared Ray, "own ray FILE" for others on Ray, "" for the rest."""
    # An argument of a test may have the fixture's name.
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    mark = item.get_closest_marker("ray")
    if "cluster" in set(getattr(item, "fixturenames", ())) - set(given) or (mark and mark.kwargs.get("shared")):
        return SHARED
    return f"own ray {item.nodeid.split('::')[0]}" if mark else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a program of the machine which is not there.

    End the shared Ray before a test that starts a Ray itself: a process has one at a time.
    """
    mark = item.get_closest_marker("machine")
    if mark and machine.find(*mark.args) is None:
        pytest.skip(f"no {mark.args[0]} here: apt-get install {mark.kwargs.get('package', mark.args[0])}")
    if ray_scope(item).startswith("own ray"):
        shared_ray.close()


@pytest.hookimpl(optionalhook=True)
# Any: the types of xdist, which a run in one process does without.
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Schedule as `--dist loadfile`, but give each scope of tests on Ray to one process.

    xdist's own groups (`--dist loadgroup`) do nothing under pytest 9.2: pytest-dev/pytest-xdist#1386.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class FilesAndRay(LoadFileScheduling):
        @functools.cached_property
        def on_ray(self) -> dict[str, str]:
            cache = getattr(config, "cache", None)
            return dict(cache.get(ON_RAY, {})) if cache else {}

        def _split_scope(self, nodeid: str) -> str:
            return self.on_ray.get(nodeid) or super()._split_scope(nodeid)

    # In the order of collection, the tests on Ray first.
    config.option.loadscopereorder = False
    return FilesAndRay(config, log)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say what a further method costs: under xdist this process has the reports of all others."""
    reports = (one for kind in terminalreporter.stats.values() for one in kind if isinstance(one, pytest.TestReport))
    if line := method_seconds.summary(method_seconds.seconds_of_methods(reports, method_seconds.method_names())):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute on one thread, so that results depend neither on the number of cores nor on other processes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def unchanged_machine() -> Iterator[None]:
    """Fail a test that tries to install or to download anything."""
    with GUARD.watching():
        yield


@pytest.fixture(scope="session", autouse=True)
def bare_machine() -> Iterator[None]:
    """Hide Debian's Fashion-MNIST if the machine is to look bare; `machine` hides the programs."""
    from rayfl.data.sources import idx

    with pytest.MonkeyPatch.context() as patch:
        if machine.is_bare():
            patch.setattr(idx, "FASHION_MNIST_OF_DEBIAN", Path("/nowhere"))
        yield


shared_ray = contextlib.ExitStack()
"""What ends the shared Ray of this process, if there is one."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray of 4 cores and 1 GPU, started as rayfl starts its own.

    Ray only counts these cores and this GPU, so that placement can be tested on any machine.
    """
    import ray

    from actors import fork_server, ray_internals, session

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with shared_ray:
        # Ray puts sockets below this folder, and the path of a socket has at most 107 characters.
        folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        shared_ray.callback(shutil.rmtree, folder, ignore_errors=True)
        shared_ray.enter_context(session.private())
        server = fork_server.ForkServer()
        shared_ray.callback(server.end)
        with ray_internals.lean_nodes(server.socket):
            ray.init(
                address="local",
                include_dashboard=False,
                _temp_dir=folder,
                log_to_driver=False,
                num_cpus=4,
                num_gpus=1,
                object_store_memory=300 * 10**6,
            )
        shared_ray.callback(ray.shutdown)
        yield
