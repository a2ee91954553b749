"""Which states stay in the coordinator's memory, and where they may not."""

import functools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import heap, session
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.limits import memory
from rayfl.rounds.setup import Setup
from tests.actors.toys import experiment


def setup(method: str, hidden: int) -> Setup:
    """An MLP of 64-hidden-10 on digits: 75 hidden + 10 parameters."""
    return prepare(experiment(method, clients={"count": 10}, model={"name": "mlp", "hidden": [hidden]}))


@contextmanager
def machine(memory_bytes: int) -> Iterator[None]:
    """Inside, a container's limit leaves this machine so much memory."""
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile("w") as limit:
        limit.write(str(memory_bytes))
        limit.flush()
        patch.setattr(memory, "_CGROUP", (Path(limit.name),))
        memory.machine_bytes.cache_clear()
        try:
            yield
        finally:
            memory.machine_bytes.cache_clear()


@pytest.mark.parametrize(
    ("method", "hidden", "counted_bytes"),
    [
        # SCAFFOLD keeps one control variate: 4 * (75 * 100 + 10) bytes a client.
        ("scaffold", 100, 4 * 7510),
        # FedPSE's state is two models, and the server keeps one of each client, beside packets that come later.
        ("fedpse", 100, 3 * 4 * 7510),
        # Two models of 4 * 15,010 bytes go to the store by themselves; the one that the server keeps does not.
        ("fedpse", 200, 4 * 15010),
        # Too large for the coordinator, too small to matter, nothing at all.
        ("scaffold", 400, 0),
        ("scaffold", 20, 0),
        ("fedavg", 100, 0),
    ],
)
def test_what_counts_is_what_ray_keeps_with_its_owner(method: str, hidden: int, counted_bytes: int):
    # All 10 clients' states times 1.6 against a quarter of the memory.
    limit = int(4 * 1.6 * 10 * counted_bytes)
    chosen = setup(method, hidden)
    with machine(limit + 1):
        assert not heap.overflows(chosen)
    with machine(max(1, limit - 1)):
        assert heap.overflows(chosen) == (counted_bytes > 0)


def test_this_machines_memory_holds_a_few_clients():
    assert not heap.overflows(setup("scaffold", 100))


@pytest.mark.parametrize("crowded", [False, True])
def test_a_ray_of_our_own_gets_the_lower_limit_where_memory_is_too_small(
    crowded: bool, monkeypatch: pytest.MonkeyPatch
):
    given: list[Mapping[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    # Ray's docstring is what says which settings it takes.
    @functools.wraps(ray.init)
    def init(**arguments: Any) -> None:
        given.append(arguments["_system_config"])

    monkeypatch.setattr(ray, "init", init)
    chosen = setup("scaffold", 100)
    with machine(10**6 if crowded else 10**15), session.session(Runtime(), chosen):
        assert given[0].get("max_direct_call_object_size") == (8192 if crowded else None)
        assert given[0]["task_events_report_interval_ms"] == 0
