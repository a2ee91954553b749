"""Components that an overlay may add: object storage, the autoscaler, a queue. And what stops a run before its pods."""

import copy
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.k8s import kuberay_schema
from tests.k8s.kuberay_schema import errors
from tests.k8s.kustomize import build
from tests.k8s.operator_rules import complaints, queue_complaints
from tests.k8s.pod_security import violations
from tests.k8s.test_manifests import (
    CLUSTERS,
    CRDS,
    JOBS,
    K8S,
    KUBERNETES,
    as_pod,
    built,
    cluster_of,
    kustomize,
    needs_crds,
    ray_pods,
    require_command,
    the,
)

# Any: a manifest is whatever its YAML holds.
Node = Any
COMPONENTS = ("object-storage", "autoscaler", "kueue", "data")
README = (K8S / "README.md").read_text(encoding="utf-8")


def composed(folder: Path, overlay: str, *components: str) -> Node:
    """The RayJob or RayCluster of an overlay with components, and the other manifests by kind and name."""
    at = os.path.relpath(K8S, folder)
    settings = {"resources": [f"{at}/{overlay}"], "components": [f"{at}/{component}" for component in components]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(settings))
    found = {(one["kind"], one["metadata"]["name"]): one for one in build(folder)}
    (main,) = [one for one in found.values() if one["kind"].startswith("Ray")]
    return main, {key: one for key, one in found.items() if one is not main}


@pytest.mark.parametrize("overlay", [*JOBS, CLUSTERS[0]])
@pytest.mark.parametrize("components", [("object-storage",), ("autoscaler",), ("object-storage", "autoscaler", "data")])
def test_every_authority_takes_an_overlay_with_components(
    overlay: str, components: tuple[str, ...], tmp_path: Path
) -> None:
    main, others = composed(tmp_path, overlay, *components)
    assert complaints(main) == []
    assert errors(main["spec"], kuberay_schema.small_schema(main["kind"])) == []
    for one in (*others.values(), *(as_pod(pod) for pod in ray_pods(main))):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    for pod in ray_pods(main):
        assert violations(pod) == []


@needs_crds
@pytest.mark.parametrize("overlay", [JOBS[1], CLUSTERS[1]])
def test_components_are_valid_under_the_whole_crds(overlay: str, tmp_path: Path) -> None:
    main, _ = composed(tmp_path, overlay, "object-storage", "autoscaler", "data")
    assert errors(main, kuberay_schema.whole_schema(CRDS, main["kind"])) == []


@pytest.mark.skipif(kustomize() is None, reason="neither kustomize nor a kubectl with kustomize 5 is there")
def test_kustomize_composes_components_as_the_tests_do(tmp_path: Path) -> None:
    main, others = composed(tmp_path, JOBS[1], "object-storage", "autoscaler", "data")
    command = [*(kustomize() or []), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(printed)}
    assert found == {(main["kind"], main["metadata"]["name"]): main, **others}


def test_only_the_head_has_an_account_and_a_way_to_object_storage(tmp_path: Path) -> None:
    main, others = composed(tmp_path, JOBS[1], "object-storage")
    head, workers = ray_pods(main)
    account, policy = others["ServiceAccount", "rayfl-storage"], others["NetworkPolicy", "rayfl-object-storage"]
    assert head["serviceAccountName"] == account["metadata"]["name"] and "serviceAccountName" not in workers
    assert head["automountServiceAccountToken"] is account["automountServiceAccountToken"] is False
    (secret,) = head["containers"][0]["envFrom"]
    assert secret["secretRef"]["name"] in re.findall(r"kubectl create secret generic ([\w-]+)", README)
    assert "envFrom" not in workers["containers"][0]
    assert {"name": "runs", "emptyDir": {}} in head["volumes"], "no claim is needed"
    labels = {**cluster_of(main)["headGroupSpec"]["template"]["metadata"]["labels"], "ray.io/node-type": "head"}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Egress"]
    reached = {
        (str(rule.get("to", [{}])[0].get("ipBlock", {}).get("cidr", "")), port["port"])
        for rule in policy["spec"]["egress"]
        for port in rule["ports"]
    }
    metadata = {("169.254.169.254/32", 80), ("169.254.169.252/32", 988), ("169.254.170.23/32", 80)}
    assert reached >= {("", 443), ("", 9000), *metadata}
    (minio,) = [rule for rule in policy["spec"]["egress"] if rule["ports"][0]["port"] == 9000]
    assert minio["to"] == [{"namespaceSelector": {}}], "a port of pods, and of no host outside"


def test_the_readmes_command_for_object_storage_is_one_that_a_job_may_repeat() -> None:
    (command,) = re.findall(r"(rayfl run [^`\n]*output\.directory=s3[^`\n]*)", README)
    experiment = require_command(command)
    assert experiment.output.directory.startswith("s3://")


def test_the_autoscaler_may_call_kubernetes_and_no_other_pod_may(tmp_path: Path) -> None:
    main, others = composed(tmp_path, JOBS[1], "autoscaler")
    spec = cluster_of(main)
    assert spec["enableInTreeAutoscaling"] is True and spec["autoscalerOptions"]["version"] == "v2"
    assert spec["workerGroupSpecs"][0]["replicas"] == 0 < spec["workerGroupSpecs"][0]["maxReplicas"]
    head, workers = ray_pods(main)
    assert head["automountServiceAccountToken"] is True and workers["automountServiceAccountToken"] is False
    policy = others["NetworkPolicy", "rayfl-autoscaler"]["spec"]
    assert policy["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    # The container that the operator adds.
    options = spec["autoscalerOptions"]
    added = {"name": "autoscaler", "image": head["containers"][0]["image"]}
    added |= {key: options[key] for key in ("securityContext", "resources")}
    head["containers"].append(added)
    assert violations(head) == []
    kubernetes_validate.validate(as_pod(head), KUBERNETES, strict=True)


# Kueue's rules


@pytest.mark.parametrize("overlay", [*JOBS, *CLUSTERS])
def test_kueue_takes_the_manifests(overlay: str, tmp_path: Path) -> None:
    main, _ = composed(tmp_path, overlay, "kueue", "object-storage")
    assert main["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rayfl"
    assert queue_complaints(main) == []
    autoscaled, _ = composed(tmp_path, overlay, "kueue", "autoscaler")
    assert queue_complaints(autoscaled) == ["a queue excludes enableInTreeAutoscaling"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda spec: spec.update(shutdownAfterJobFinishes=False), "a job with a queue needs"),
        (lambda spec: spec.update(clusterSelector={"ray.io/cluster": "rayfl"}), "a job with a queue excludes"),
        (lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(groupName="head"), "a queue takes at most"),
    ],
)
def test_kueues_rules_find_what_breaks_them(change: Callable[[Node], object], complaint: str) -> None:
    document = copy.deepcopy(the(JOBS[0]))
    change(document["spec"])
    (found,) = queue_complaints(document)
    assert found.startswith(complaint)


# Heads and spot nodes


@pytest.mark.parametrize("folder", [*JOBS, *CLUSTERS])
def test_a_head_stays_off_nodes_that_the_provider_takes_back(folder: str) -> None:
    head, workers = ray_pods(the(folder))
    node = head["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = node["nodeSelectorTerms"]
    refused = {(one["key"], value) for one in term["matchExpressions"] for value in one["values"]}
    assert {one["operator"] for one in term["matchExpressions"]} == {"NotIn"}
    assert refused >= {("cloud.google.com/gke-spot", "true"), ("eks.amazonaws.com/capacityType", "SPOT")}
    assert "affinity" not in workers


# The end of a pod


def hook(pod: Node) -> str:
    """The script of a pod's preStop hook."""
    program, option, script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, option) == ("/bin/sh", "-c")
    return script


def process(folder: Path, number: int, parent: int, *words: str) -> None:
    """A process as /proc shows it."""
    (folder / str(number)).mkdir(parents=True)
    (folder / str(number) / "cmdline").write_text("".join(f"{word}\0" for word in words))
    (folder / str(number) / "status").write_text(f"Name:\tx\nPid:\t{number}\nPPid:\t{parent}\nThreads:\t1\n")


def stopped(script: str, folder: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """Run a hook with the processes in a folder, and with a function in place of `kill` or `sleep`."""
    text = f"{program}\n{script.replace('/proc', str(folder))}"
    return subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, timeout=30, check=False)


def test_the_heads_hook_signals_each_command_of_rayfl_once_and_waits_for_its_end(tmp_path: Path) -> None:
    head, _ = ray_pods(the(JOBS[0]))
    folder = tmp_path / "proc"
    # A job's command, which is two processes; a sweep with a run; and what must not be signalled.
    process(folder, 40, 1, "/bin/sh", "-c", "cd /tmp && rayfl run demo")
    process(folder, 41, 40, "/usr/local/bin/python", "/usr/local/bin/rayfl", "run", "demo", "--resume")
    process(folder, 42, 41, "/usr/local/bin/python", "/usr/local/bin/rayfl", "run", "demo", "--resume")
    process(folder, 50, 1, "python", "-m", "rayfl", "sweep", "two.toml")
    process(folder, 51, 50, "python", "-m", "rayfl", "sweep", "two.toml")
    process(folder, 52, 51, "python", "-m", "rayfl", "run", "one.toml")
    process(folder, 60, 1, "ray::Coordinator.run")
    process(folder, 61, 1, "tail", "-f", "/srv/rayfl/runs/demo/log")
    process(folder, 62, 1, "grep", "(^|/)rayfl$")
    signals = tmp_path / "signals"
    gone = " ".join(shlex.quote(str(folder / str(number))) for number in (41, 42, 50, 51, 52))
    # They end while the hook waits.
    program = f'kill() {{ echo "$@" >> {signals}; }}\nsleep() {{ rm -rf {gone}; }}'
    done = stopped(hook(head), folder, program)
    assert (done.returncode, done.stdout) == (1, "") or done.returncode == 0, done.stderr
    assert signals.read_text() == "-TERM 41 50\n" and not (folder / "42").exists()
    signals.unlink()
    # Without a run it signals nobody and does not wait.
    done = stopped(hook(head), folder, f'kill() {{ echo "$@" >> {signals}; }}\nsleep() {{ exit 9; }}')
    assert done.returncode != 9 and not signals.exists()


def test_a_workers_hook_waits_for_the_actors_of_a_run_and_not_for_ever(tmp_path: Path) -> None:
    _, workers = ray_pods(the(JOBS[0]))
    folder, waited = tmp_path / "proc", tmp_path / "waited"
    process(folder, 70, 1, "ray::ClientActor.train")
    process(folder, 71, 1, "ray::IDLE")
    program = f"sleep() {{ echo >> {waited}; %s; }}"
    stopped(hook(workers), folder, program % f"rm -rf {folder / '70'}")
    assert waited.read_text() == "\n"
    stopped(hook(workers), folder, "sleep() { exit 9; }")
    process(folder, 70, 1, "ray::ClientActor")
    waited.unlink()
    done = stopped(hook(workers), folder, program % ":")
    assert done.returncode != 9
    # Then Ray drains the worker's node.
    (drain_s,) = (one["value"] for one in workers["containers"][0]["env"] if "DRAIN" in one["name"])
    assert len(waited.read_text()) + int(drain_s) < workers["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize("folder", [*JOBS, *CLUSTERS])
def test_pods_of_ray_alone_have_time_to_end(folder: str) -> None:
    for pod in ray_pods(the(folder)):
        assert pod["terminationGracePeriodSeconds"] == 120 and hook(pod)
    for document in built(folder):
        if document["kind"] == "RayJob":
            submitter = document["spec"]["submitterPodTemplate"]["spec"]
            assert "terminationGracePeriodSeconds" not in submitter and "lifecycle" not in submitter["containers"][0]
