"""Every private part of Ray that rayfl uses. The other files use only Ray's public API.

Each part is looked up when it is needed. If this version of Ray lacks it, or if RAYFL_PLAIN_RAY=1 is set, rayfl
does without it; the docstrings here say what that costs. No part changes a number of a run.
"""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import reduce
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import ClusterError
from actors.forked_worker import SERVER, USUAL_WORKER
from rayfl.errors import log
from rayfl.untyped import Foreign

if TYPE_CHECKING:
    from ray import ObjectRef

PLAIN = "RAYFL_PLAIN_RAY"
"""The environment variable that turns off the fork server and all of Ray's private parts, if it is set to 1."""

TOKEN_MODE = "ray._raylet:Config.initialize"
TOKEN = "ray._raylet:AuthenticationTokenLoader.instance"
LOOPBACK = "ray._private.ray_constants:ENABLE_RAY_CLUSTER"
PRINTING = "ray._private.worker:print_to_stdstream"
NODE = "ray._private.worker:_global_node"
RAYLET = "ray._private.node:Node.start_raylet"
PORTS = "ray._raylet:persist_port"
DRAINING = "ray._private.state:state.get_draining_nodes"
REFERENCES = "ray._raylet:CoreWorker.get_all_reference_counts"
THIS_WORKER = "ray._private.worker:global_worker"
IDLE = ("start_api_server", "start_log_monitor", "start_monitor")
PARTS = (TOKEN_MODE, TOKEN, LOOPBACK, PRINTING, NODE, RAYLET, PORTS, DRAINING, REFERENCES, THIS_WORKER)
PARTS += tuple(f"ray._private.node:Node.{name}" for name in IDLE)
"""The names that are looked up, as module:attribute."""

GET_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A gRPC method that every head answers, and that takes no argument."""

_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
"""Ray's names for the ports of a node's agents."""

_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _TRIES, _STRIDE = 20_000, 10, 997
_asked = count()


def is_plain() -> bool:
    """Whether the user wants Ray without its private parts."""
    return os.environ.get(PLAIN) == "1"


def find(part: str) -> tuple[Foreign, str] | None:
    """The object that has a part as an attribute, and the attribute's name; None if Ray is to be used without it."""
    module, _, path = part.partition(":")
    *outer, name = path.split(".")
    with suppress(ImportError, AttributeError):
        owner: Foreign = reduce(getattr, outer, import_module(module))
        if hasattr(owner, name) and not is_plain():
            return owner, name
    return None


def _value(part: str) -> Foreign:
    """The part itself, or None."""
    owner = find(part)
    return getattr(*owner) if owner else None


@contextmanager
def _replaced(part: str, make: Callable[[Foreign], Foreign]) -> Iterator[None]:
    """Context manager: replace the part by `make(part)` in the block. Do nothing if this Ray lacks the part."""
    with ExitStack() as restored:
        if owner := find(part):
            restored.callback(setattr, *owner, getattr(*owner))
            setattr(*owner, make(getattr(*owner)))
        yield


def prepare_plain_ray() -> None:
    """With RAYFL_PLAIN_RAY=1, set the public environment variables that replace the private parts.

    Call before Ray is imported. Ray then requires a token and uses 127.0.0.1 as a node's address. A RAY_AUTH_MODE that
    is already set, such as "disabled" for a cluster without tokens, is kept.
    """
    if is_plain() and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def new_token() -> dict[str, str | None]:
    """Return the environment variables that make a Ray require a new random token.

    If this process has loaded Ray without token mode and Ray cannot be switched, raise ClusterError: any user of this
    machine could then run code as this user. If RAY_AUTH_MODE=disabled says that this is intended, return {}.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if _value(TOKEN_MODE) is not None or mode == "token":
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if mode == "disabled":
        return {}
    raise ClusterError(
        "this process has loaded Ray without its tokens, so that any user of this machine could use its Ray; set "
        f"{PLAIN}=1 and RAY_AUTH_MODE=token before Python starts, or RAY_AUTH_MODE=disabled to do without tokens"
    )


def read_token_again() -> None:
    """Make Ray read the variables about tokens again.

    Without it, Ray keeps the mode that it read as it was loaded, and the token that it used first.
    """
    # The mode first: as long as it is "token", Ray must find a token.
    if (initialize := _value(TOKEN_MODE)) is not None:
        initialize("")
    if (loader := _value(TOKEN)) is not None:
        loader().reset_cache()


def has_token() -> bool:
    """Whether this process has a token; False if that is unknown."""
    loader = _value(TOKEN)
    return loader is not None and loader().has_token(ignore_auth_mode=True)


def loopback() -> AbstractContextManager[None]:
    """Context manager: Ray accepts 127.0.0.1 as the address of a node, and of a cluster to join.

    Otherwise Ray replaces it by the machine's address, at which other machines reach its processes; a token still
    keeps them out.
    """
    return _replaced(LOOPBACK, lambda before: False)


def published_lines_logged() -> AbstractContextManager[None]:
    """Context manager: log the lines that Ray's processes publish, such as the last ones of a raylet's log, as DEBUG.

    Otherwise Ray prints them to stdout, also with log_to_driver=False.
    """
    return _replaced(PRINTING, lambda before: lambda data, ignore_prefix: log.debug(" ".join(data["lines"])))


def own_processes() -> dict[str, int]:
    """Process ids of the gcs_server and raylet that this process started, by name. Ray ends if one of them ends.

    {} if this Ray lacks the private part: Ray's own code then ends the driver, up to a minute later.
    """
    node = _value(NODE)
    names = ("gcs_server", "raylet") if node else ()
    return {name: node.all_processes[name][0].process.pid for name in names}


def shut_down() -> None:
    """Shut down the Ray that this process started, with the processes that would outlive it for a moment.

    An agent that is still loading would make its folders again after they are removed.
    """
    import psutil
    import ray

    left: list[psutil.Process] = []
    with suppress(psutil.Error, KeyError, IndexError):
        left = [child for pid in own_processes().values() for child in psutil.Process(pid).children(recursive=True)]
    ray.shutdown()
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def draining_nodes() -> Mapping[str, int]:
    """The nodes that Ray drains, because they are announced to end: the milliseconds since 1970 of the end by node id,
    0 if none was given. Without it {}: such a node counts as one that dies without an announcement."""
    look = _value(DRAINING)
    return look() if look else {}


def known_objects() -> "list[ObjectRef]":
    """References to all objects that this process uses. Without it []: objects on a node that ends are lost."""
    from ray import ObjectRef

    count = _value(REFERENCES)
    worker = _value(THIS_WORKER)
    names = count(worker.core_worker) if count and worker else ()
    return [ObjectRef(bytes.fromhex(name.decode())) for name in names]


def system_config(**settings: Foreign) -> dict[str, Foreign]:
    """The argument of ray.init with settings that have no public name; {} if the user wants Ray without it.

    With Ray's defaults, a run on a small machine takes more memory, and a worker that dies as it starts is noticed
    later.
    """
    return {} if is_plain() else {"_system_config": settings}


@contextmanager
def lean_nodes(fork_server: str | None) -> Iterator[None]:
    """Context manager: nodes that are started in the block start faster.

    They start without idle processes and do not wait for their agents. Their workers are forks of the fork server that
    listens at the socket `fork_server`; None: Ray starts its own program.

    Without these parts the first round comes seconds later. Ray then also starts, for a second of a core and 70 MB
    each: with include_dashboard=False a dashboard, to report its use, which is off; a log monitor, which
    log_to_driver=False leaves without work; a monitor, which asks a cloud for nodes.

    It is a patch, because ray.cluster_utils.Cluster, which takes some of this as arguments, always starts the dashboard
    and waits for it: ray.init took 2 s with the patch, 5 s with Cluster.
    """

    def lean(start_raylet: Foreign) -> Foreign:
        def start(node: Foreign, *words: Foreign, **settings: Foreign) -> None:
            _choose_ports(node)
            if fork_server is not None:
                os.environ[SERVER] = fork_server
                os.environ[USUAL_WORKER] = node._ray_params.worker_path
                node._ray_params.worker_path = str(Path(__file__).with_name("forked_worker.py"))
            start_raylet(node, *words, **settings)

        return start

    with ExitStack() as replaced:
        for name in IDLE:
            replaced.enter_context(_replaced(f"ray._private.node:Node.{name}", lambda before: lambda *_, **__: None))
        replaced.enter_context(_replaced(RAYLET, lean))
        for name in (USUAL_WORKER, SERVER):
            replaced.callback(os.environ.pop, name, None)
        yield


def _choose_ports(node: Foreign) -> None:
    """Choose the ports of a node's agents, which take two seconds to load.

    Otherwise the node waits until the agents have chosen, and the agent of a second Ray on this machine tries for
    seconds to get the default port.
    """
    persist = _value(PORTS)
    for name, port in zip(_AGENT_PORTS, free_ports(len(_AGENT_PORTS)) if persist else (), strict=False):
        setattr(node._ray_params, name, port)
        # An agent records the port that it has chosen in this way.
        persist(node._session_dir, node._node_id, name, port)


def free_ports(length: int) -> list[int]:
    """Find `length` consecutive free ports below the range that the kernel gives to connections; [] if there are none.

    Calls return different ports, also in processes that ask at the same time.
    """
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
