"""A Ray session: the local Ray that rayfl starts for its runs, or the cluster that it joins.

No signature here has a type of Ray, so that jobs need not import Ray.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from actors import parent_process, ray_internals, start_or_join
from actors.placement import require_room_here
from rayfl.experiment.runtime import Runtime


@contextmanager
def session(runtime: Runtime, resume: str | None = None) -> Iterator[None]:
    """Context manager: Ray for a run.

    It is the Ray that this process already uses, the cluster that runtime.address or RAY_ADDRESS names, or a new local
    Ray. A local Ray lets nobody else in (actors/start_or_join.py). A Ray that was started or joined here is shut down
    at the end. `resume` is the command that continues the run, if there is a run to continue. Raise ClusterError if no
    cluster answers or Ray does not start, RayflError for a wrong address, or if this machine cannot hold the actors.
    """
    if ray.is_initialized():
        yield
        return
    parent_process.report(processes={})
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = runtime.cluster
    if cluster is None:
        require_room_here(runtime)
        opened = start_or_join.started(runtime.object_store_memory_mb, resume)
    else:
        opened = start_or_join.joined(cluster)
    with ray_internals.published_lines_logged(), opened:
        parent_process.report(cluster=cluster, processes={} if cluster else ray_internals.own_processes())
        try:
            yield
        finally:
            parent_process.report(cluster=None, processes={})


def opening(runtime: Runtime) -> str:
    """What `session` does first, in words for the user."""
    if ray.is_initialized():
        return "starting client actors"
    return f"joining the Ray cluster at {runtime.cluster}" if runtime.cluster else "starting Ray"


def address() -> str:
    """The address at which other processes join the Ray of this session."""
    return ray.get_runtime_context().gcs_address
