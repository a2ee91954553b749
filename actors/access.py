"""Access control. A Ray that rayfl starts listens on 127.0.0.1 and requires a random token. A cluster that rayfl joins
keeps its own rules.

The token is Ray's own token authentication: without it, Ray's servers and actors' processes refuse every call. Ray
reads its mode and token from the environment once a process, and Ray's processes inherit the environment. So a
session's token is in the environment of the session's processes, which only their user can read, and nowhere else.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from actors import ray_internals
from actors.errors import ClusterError

log = logging.getLogger("rayfl")

LOOPBACK = "127.0.0.1"
"""The address of a node that no other machine can reach."""

_ANSWER_S = 5.0
"""Timeout for asking a cluster's head whether it requires a token, in seconds."""


@contextmanager
def private() -> Iterator[None]:
    """Context manager: a Ray that is started in the block requires a new random token and may listen on 127.0.0.1.

    This process and the processes that it starts in the block have the token. End the Ray in the block, too. The
    environment variables about tokens, which are for clusters, are restored after the block.
    """
    without = {"RAY_AUTH_TOKEN_PATH": None, "RAY_ENABLE_K8S_TOKEN_AUTH": None}
    token = ray_internals.new_token()
    with _variables(token | without if token else {}), ray_internals.loopback():
        yield


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Context manager: in the block, `ray.init` can join the cluster at `address` (host:port or auto).

    If the cluster requires a token, it is read from RAY_AUTH_TOKEN, from the file that RAY_AUTH_TOKEN_PATH names or
    from ~/.ray/auth_token. If the cluster requires none, a warning is logged. Raise ClusterError if the required token
    is missing or wrong.
    """
    # None if no Ray runs on this machine; ray.init has its own error for that.
    found = ray_internals.running_head() if address == "auto" else address
    refused = _refuses(found, {}) if found else None
    if refused is False:
        log.warning(
            f"the cluster at {address} has no token authentication: whoever reaches its ports runs code there as its "
            "user; start it with RAY_AUTH_MODE=token"
        )
    mode = os.environ.get("RAY_AUTH_MODE", "token" if refused else None)
    with _variables({"RAY_AUTH_MODE": mode}), ray_internals.loopback():
        if refused and found:
            token = {} if os.environ["RAY_AUTH_MODE"].lower() == "disabled" else ray_internals.token_headers()
            if token is not None and _refuses(found, token):
                raise ClusterError(
                    f"the cluster at {address!r} {'refuses this token' if token else 'asks for a token'}; give its "
                    "token in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names or in ~/.ray/auth_token, and "
                    "leave RAY_AUTH_MODE unset"
                )
        yield


def _refuses(head: str, token: Mapping[str, str]) -> bool | None:
    """Whether a cluster's head refuses a call with these headers; None if it does not answer."""
    import grpc

    # Closed at once: a process with an open channel must not fork, as ray.init does.
    with grpc.insecure_channel(head) as channel:
        try:
            metadata = tuple((name.lower(), value) for name, value in token.items())
            channel.unary_unary(ray_internals.GET_CLUSTER_ID)(b"", timeout=_ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            # Any: a grpc.RpcError of a call is a grpc.Call, too, and its type does not say so.
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            return True if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED) else None
    return False


@contextmanager
def _variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager: set environment variables (None: unset) in the block, and restore the earlier ones after it."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ray_internals.read_token_again()
