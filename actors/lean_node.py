"""A Ray that starts soon: without processes that would have nothing to do, without waiting for those that are needed
later, and with workers that are forked (actors/fork_server.py).

All of it is Ray's own affair, so that another version of Ray may lack some of it, and then starts as it would anyway.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._raylet import persist_port  # pyright: ignore[reportAttributeAccessIssue]

from actors.fork_server import WORKER, ForkServer
from actors.forked_worker import SERVER
from actors.supervisor import children_of

_IDLE = ("start_api_server", "start_log_monitor", "start_monitor")
"""Of Python processes that have nothing to do in a Ray of ours. Each of them loads Ray: a second of a core, and 70 MB.

With include_dashboard=False Ray still starts the dashboard's, to report its use, which is off, and ray.init waits until
it answers; the log monitor's sends workers' output to the driver, which log_to_driver=False takes from none; and the
monitor's asks a cloud for nodes, where there is one.
"""

_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Of the agents, which load for two seconds, as Ray calls them. A node that is given none waits until the agents have
chosen; and the agent of a second Ray on a machine tries for seconds to get the dashboard's default one."""

_FIRST_PORT, _TRIES, _STRIDE = 20_000, 10, 997
_asked = count()

_WORKERS, _LAST = ("RAY_worker_niceness", "15"), 4
"""The niceness of Ray's workers, where the environment has it, and by default; and how much nicer agents are."""

_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextmanager
def lean_node(server: ForkServer | None) -> Iterator[None]:
    """Nodes of Ray that are started inside are lean; their workers are forks of the server's, if one is given."""
    before = {name: getattr(Node, name) for name in (*_IDLE, "start_raylet") if hasattr(Node, name)}
    start_raylet = before.pop("start_raylet", None)
    for name in before:
        setattr(Node, name, lambda node, **settings: None)

    # Any: Ray's own arguments.
    def start(node: Any, *words: Any, **settings: Any) -> None:
        assert start_raylet is not None, "it stands in for that"
        for name, port in zip(_PORTS, free_ports(len(_PORTS)), strict=False):
            setattr(node._ray_params, name, port)
            # Where an agent would write that it has chosen.
            persist_port(node._session_dir, node._node_id, name, port)
        if server is not None:
            node._ray_params.worker_path = str(WORKER)
        start_raylet(node, *words, **settings)
        raylets.append(node.all_processes["raylet"][0].process.pid)

    raylets: list[int] = []
    if start_raylet is not None:
        setattr(Node, "start_raylet", start)  # noqa: B010 (its signature is Ray's affair)
    if server is not None:
        os.environ[SERVER] = server.socket
    try:
        yield
        for raylet in raylets:
            _put_agents_last(raylet)
    finally:
        os.environ.pop(SERVER, None)
        for name, method in before.items():
            setattr(Node, name, method)
        if start_raylet is not None:
            Node.start_raylet = start_raylet


def _put_agents_last(raylet: int) -> None:
    """Let the agents load after the workers, which Ray makes give way to them."""
    niceness = int(os.environ.get(*_WORKERS)) + _LAST
    for agent in children_of(raylet):
        # Some may have ended.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, agent, niceness)


def free_ports(length: int) -> list[int]:
    """So many ports in a row at which nobody listens, and which the kernel gives to no connection meanwhile; none where
    it may give any. Who asks next gets others, in this process and in one that asks at the same time."""
    try:
        groups = (int(_LOCAL_PORTS.read_text().split()[0]) - _FIRST_PORT) // length
    except (OSError, ValueError, IndexError):
        return []
    for _ in range(min(groups, _TRIES)):
        first = _FIRST_PORT + (os.getpid() + next(_asked) * _STRIDE) % groups * length
        ports = list(range(first, first + length))
        with suppress(OSError), ExitStack() as held:
            for port in ports:
                held.enter_context(socket.socket()).bind(("", port))
            return ports
    return []
