"""What Pod Security's level "restricted" refuses in a pod's specification, as the Pod Security Standards list it."""

from collections.abc import Iterator, Mapping
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""The volumes that are allowed."""

# Any: a pod is whatever its YAML holds.
Pod = Mapping[str, Any]


def violations(pod: Pod) -> list[str]:
    """One phrase for each rule of the level that a pod's specification breaks; empty if it would be let in."""
    return [*_pod(pod), *(phrase for container in _containers(pod) for phrase in _container(pod, container))]


def _containers(pod: Pod) -> list[Pod]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [container for kind in kinds for container in pod.get(kind, [])]


def _pod(pod: Pod) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for volume in pod.get("volumes", []):
        if kinds := volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']}: {', '.join(sorted(kinds))}"
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _container(pod: Pod, container: Pod) -> Iterator[str]:
    name, whole, own = container["name"], pod.get("securityContext", {}), container.get("securityContext", {})
    both = {**whole, **own}
    if own.get("privileged"):
        yield f"{name}: privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities"
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield f"{name}: runAsNonRoot"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"{name}: seccompProfile"
    if both.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield f"{name}: hostPort"
