"""Heads of Ray clusters as people start them, with `ray start`, which ask for a token and listen on loopback."""

import itertools
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

BIN = Path(sys.executable).parent
TOKEN = secrets.token_hex(32)


class Head(NamedTuple):
    """A head that runs: where its dashboard and its cluster are reached, and the process above all of its own."""

    dashboard: str
    address: str
    process: "subprocess.Popen[bytes]"


def environment() -> dict[str, str]:
    """This process's environment, with this Python first and no other cluster in it."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return clean | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        # Or `ray start` takes this machine's own address for the one that it is given.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now.

    They lie between the ports of Ray's workers and those that Linux gives to programs that name none, so that nobody
    is given one of them before the head binds it.
    """
    candidates = random.SystemRandom().sample(range(20_000, 32_768), 200)
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def answers(url: str) -> bool:
    """Whether a page comes."""
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def started_head(
    num_cpus: int = 2, workers: Mapping[str, Any] | None = None, version: int = 2, idle_s: float = 6.0
) -> Iterator[Head]:
    """A head of `num_cpus` cores that runs inside.

    `workers`: the node types of Ray's autoscaler of this `version`, which starts such nodes on this machine and takes
    back what has been idle for `idle_s` seconds; None: no autoscaler.
    """
    gcs, dashboard, client, agent, metrics = free_ports(5)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        options: dict[str, object] = {
            "port": gcs,
            "node-ip-address": "127.0.0.1",
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "ray-client-server-port": client,
            "dashboard-agent-listen-port": agent,
            "metrics-export-port": metrics,
            "num-cpus": num_cpus,
            "temp-dir": scratch,
        }
        around = environment()
        if workers is not None:
            options["autoscaling-config"] = file = Path(scratch) / "autoscaling.json"
            file.write_text(json.dumps(autoscaling(workers, f"127.0.0.1:{gcs}", idle_s)))
            around |= {
                "RAY_FAKE_CLUSTER": "1",
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_enable_autoscaler_v2": str(version - 1),
                "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            }
        given = [f"--{key}={value}" for key, value in options.items()]
        log = Path(scratch) / "head.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(BIN / "ray"), "start", "--head", "--block", *given],
                stdout=output,
                stderr=output,
                env=around,
                cwd=scratch,
                start_new_session=True,
            )
        try:
            address, deadline = f"http://127.0.0.1:{dashboard}", time.monotonic() + 60
            while not answers(f"{address}/api/version"):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield Head(address, f"127.0.0.1:{gcs}", process)
        finally:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
            # Of a node that the autoscaler takes back, Ray leaves the log monitor.
            for each in below:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


HEAD_ID = "f" * 51 + "00000"
"""The id by which Ray's provider of nodes on one machine knows the head."""


def autoscaling(workers: Mapping[str, Any], address: str, idle_s: float) -> dict[str, Any]:
    """The file that `ray start --autoscaling-config` takes, of nodes that are processes of this machine."""
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "simulated",
        "max_workers": 8,
        "provider": {
            # The module of fake_multinode, whose own defaults are no part of Ray as pip installs it.
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            **{name: {"node_config": {}, "min_workers": 0, **kind} for name, kind in workers.items()},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_s / 60,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        **{f"{name}_commands": [] for name in commands},
    }
