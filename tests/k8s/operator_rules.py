"""What KubeRay v1.7's operator refuses although its CRDs allow it, and what Kubernetes would accept and never run.

The rules are those of the operator's validation of RayCluster and RayJob, as far as these manifests could break them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from packaging.version import Version

TOKEN_AUTHENTICATION = Version("2.52.0")
"""The first Ray that knows RAY_AUTH_MODE=token."""

# Any: a manifest is whatever the YAML file holds.
Manifest = Mapping[str, Any]


def complaints(manifest: Manifest) -> list[str]:
    """One sentence for each rule that a RayCluster or RayJob breaks; empty if the operator would take it."""
    if manifest["kind"] == "RayCluster":
        return [*_name(manifest, 53), *_cluster(manifest["spec"])]
    return [*_name(manifest, 47), *_job(manifest["spec"])]


def queue_complaints(manifest: Manifest) -> list[str]:
    """One sentence for each rule of Kueue's webhooks that a RayCluster or RayJob with a queue breaks.

    The rules are those of its default feature gates.
    """
    spec, found = manifest["spec"], []
    if manifest["kind"] == "RayJob" and not spec.get("shutdownAfterJobFinishes", False):
        found.append("a job with a queue needs shutdownAfterJobFinishes")
    if "clusterSelector" in spec:
        found.append("a job with a queue excludes clusterSelector")
    cluster = spec.get("rayClusterSpec", spec)
    if cluster.get("enableInTreeAutoscaling", False):
        found.append("a queue excludes enableInTreeAutoscaling")
    groups = [worker["groupName"] for worker in cluster.get("workerGroupSpecs", [])]
    if len(groups) > 7 or "head" in groups:
        found.append("a queue takes at most 7 groups of workers, none of which is called head")
    return found


def _name(manifest: Manifest, longest: int) -> Iterator[str]:
    name = manifest["metadata"]["name"]
    # The operator appends to it, and Kubernetes takes at most 63 characters.
    if len(name) > longest or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"name {name!r} is not a DNS label of at most {longest} characters"


def _job(spec: Manifest) -> Iterator[str]:
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    if not shuts_down and spec.get("suspend"):
        yield "suspend needs shutdownAfterJobFinishes"
    if not shuts_down and spec.get("ttlSecondsAfterFinished", 0) > 0:
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if shuts_down and "deletionStrategy" in spec:
        yield "shutdownAfterJobFinishes excludes deletionStrategy"
    if ("rayClusterSpec" in spec) == ("clusterSelector" in spec):
        yield "exactly one of rayClusterSpec and clusterSelector is needed"
    if "clusterSelector" in spec and spec.get("suspend"):
        yield "suspend excludes clusterSelector"
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode == "SidecarMode" and {"submitterPodTemplate", "submitterConfig"} & set(spec):
        yield "SidecarMode has no submitter to configure"
    if mode == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield "InteractiveMode excludes backoffLimit"
    submitter = spec.get("submitterPodTemplate", {}).get("spec", {"restartPolicy": "Never"})
    # Kubernetes refuses the Job that the operator makes of it, and a pod without a policy has Always.
    if submitter.get("restartPolicy", "Always") not in ("Never", "OnFailure"):
        yield "the submitter's restartPolicy must be Never or OnFailure"
    if spec.get("activeDeadlineSeconds", 1) <= 0 or spec.get("backoffLimit", 0) < 0:
        yield "activeDeadlineSeconds must be positive and backoffLimit at least 0"
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield "ttlSecondsAfterFinished must be at least 0"
    if not isinstance(yaml.safe_load(spec.get("runtimeEnvYAML", "{}")), dict):
        yield "runtimeEnvYAML is not a YAML mapping"
    if "rayClusterSpec" in spec:
        yield from _cluster(spec["rayClusterSpec"])


def _cluster(spec: Manifest) -> Iterator[str]:
    head, workers = spec["headGroupSpec"], spec.get("workerGroupSpecs", [])
    for name, group in [("head", head), *((worker["groupName"], worker) for worker in workers)]:
        yield from _group(name, group)
    names = [worker["groupName"] for worker in workers]
    if len(set(names)) != len(names):
        yield f"groupName is given twice: {names}"
    for worker in workers:
        if not 0 <= worker["minReplicas"] <= worker.get("replicas", worker["minReplicas"]) <= worker["maxReplicas"]:
            yield f"group {worker['groupName']}: minReplicas <= replicas <= maxReplicas does not hold"
    yield from _authentication(spec)
    yield from _autoscaler(spec, [head, *workers])


def _group(name: str, group: Manifest) -> Iterator[str]:
    start = group.get("rayStartParams", {})
    if not all(isinstance(value, str) for value in start.values()):
        yield f"group {name}: rayStartParams takes strings only"
    if "labels" in start:
        yield f"group {name}: labels do not go into rayStartParams"
    if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(start):
        yield f"group {name}: resources are given twice"
    if not group["template"]["spec"].get("containers"):
        yield f"group {name}: no container"


def _authentication(spec: Manifest) -> Iterator[str]:
    token = spec.get("authOptions", {}).get("mode") == "token"
    if token and Version(spec.get("rayVersion", "0")) < TOKEN_AUTHENTICATION:
        yield f"token authentication needs rayVersion {TOKEN_AUTHENTICATION} or newer"


def _autoscaler(spec: Manifest, groups: list[Manifest]) -> Iterator[str]:
    pods = [group["template"]["spec"] for group in groups]
    names = {entry["name"] for pod in pods for container in pod["containers"] for entry in container.get("env", [])}
    by_variable = "RAY_enable_autoscaler_v2" in names
    if not spec.get("enableInTreeAutoscaling", False):
        if by_variable:
            yield "RAY_enable_autoscaler_v2 needs enableInTreeAutoscaling"
        return
    is_v2 = by_variable or spec.get("autoscalerOptions", {}).get("version") == "v2"
    if is_v2 and any(pod.get("restartPolicy", "Never") != "Never" for pod in pods):
        yield "autoscaler v2 needs restartPolicy Never"
