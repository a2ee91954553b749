"""Local Ray clusters of several nodes, which can be killed: for benchmarks and for tests."""

import logging
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from ray.cluster_utils import Cluster

from actors import fork_server, ray_internals, session
from actors.errors import ClusterError
from actors.fork_server import ForkServer

log = logging.getLogger("rayfl")

Started = TypeVar("Started")
NODE = {"object_store_memory": 200 * 10**6, "node_ip_address": session.LOOPBACK}


class Nodes:
    """A cluster: a head without cores, for driver and coordinator, and nodes of `num_cpus` cores for client actors."""

    def __init__(self, cluster: Cluster, num_nodes: int, num_cpus: int, server: ForkServer | None = None) -> None:
        self._cluster, self._num_cpus, self._server = cluster, num_cpus, server
        for _ in range(num_nodes):
            self.add()

    @property
    def address(self) -> str:
        """The address at which a driver joins."""
        return str(self._cluster.address)

    def roots(self) -> Sequence[int]:
        """The processes that Ray started for the nodes, and the fork server; workers are below these."""
        # Ray lists a node's processes by their purpose.
        started = [info for node in self._cluster.list_all_nodes() for info in node.all_processes.values()]
        pids = [each.process.pid for infos in started for each in infos]
        return pids if self._server is None else [*pids, self._server.process.pid]

    def exchange(self, chance: random.Random) -> int:
        """Kill a random node with its actors and its object store, and have another one join. Return 1."""
        lost = chance.choice(sorted(self._cluster.worker_nodes, key=lambda node: node.unique_id))
        self._cluster.remove_node(lost, allow_graceful=False)
        self.add()
        return 1

    def add(self, labels: Mapping[str, str] | None = None, num_gpus: int = 0) -> str:
        """Have a node join, with these labels and pretended GPUs. Return its id."""
        has = {"num_cpus": self._num_cpus, "num_gpus": num_gpus, "labels": dict(labels or {}), **NODE}
        node = _started(lambda: self._cluster.add_node(**has), self._server)
        return str(node.node_id)

    def remove(self, node_id: str) -> None:
        """Kill a node with its actors and its object store."""
        (lost,) = (node for node in self._cluster.worker_nodes if node.node_id == node_id)
        self._cluster.remove_node(lost, allow_graceful=False)


@contextmanager
def own_cluster(num_nodes: int = 3, num_cpus: int = 1) -> Iterator[Nodes]:
    """Context manager: a cluster of `num_nodes` nodes, which ends with the block. All nodes share this machine's cores.

    Call it from the main thread, because Ray sets signal handlers. Raise ClusterError if it does not start.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    before = signal.getsignal(signal.SIGTERM)
    with session.private(), ExitStack() as ending:
        server = fork_server.begin()
        ending.callback(fork_server.end)
        head = {"num_cpus": 0, "include_dashboard": False}
        cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head | NODE), server)
        try:
            yield Nodes(cluster, num_nodes, num_cpus, server)
        finally:
            cluster.shutdown()
            signal.signal(signal.SIGTERM, before)


def _started(start: Callable[[], Started], server: ForkServer | None) -> Started:
    """Return what `start` returns, lean nodes. Try three times, because a busy machine may be too slow at first."""
    for _ in range(2):
        try:
            with ray_internals.lean_nodes(server and server.socket):
                return start()
        # Ray raises Exception itself.
        except Exception:  # noqa: BLE001
            log.info("a node did not start; trying again")
        finally:
            # Ray's own handler asks the nodes for half a minute.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ray_internals.lean_nodes(server and server.socket):
            return start()
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise ClusterError(f"a node of the benchmark's own cluster did not start, three times: {words}") from error
