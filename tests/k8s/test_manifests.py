"""The manifests, as kustomize prints them, against KubeRay's and Kubernetes' schemas, the operator's rules and Pod
Security."""

import copy
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from jobs.cli import run
from rayfl.experiment.experiment import Experiment, read
from tests.k8s import kuberay_schema
from tests.k8s.image import WORKDIR
from tests.k8s.kuberay_schema import errors
from tests.k8s.kustomize import build
from tests.k8s.operator_rules import complaints
from tests.refusals import refused
from tests.test_packaging import constraints

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
CRDS = Path(os.environ.get("KUBERAY_CRDS", "no folder"))
needs_crds = pytest.mark.skipif(
    not (CRDS / "ray.io_rayclusters.yaml").is_file(),
    reason="KubeRay's CRDs are absent: KUBERAY_CRDS names a folder of ray.io_rayclusters.yaml and ray.io_rayjobs.yaml",
)
JOBS = ("overlays/kind", "overlays/cpu", "overlays/gpu")
CLUSTERS = tuple(f"{job}/cluster" for job in JOBS)
READERS = tuple(f"{job}/reader" for job in JOBS)
FOLDERS = (*JOBS, *CLUSTERS, *READERS, "setup", "outside")
KUBERNETES = "1.37"
"""The version whose schemas are used."""
UNITS = {"Mi": 2**20, "Gi": 2**30}

# Any: a manifest is whatever its YAML holds.
Node = Any


@cache
def built(folder: str) -> list[Node]:
    return build(K8S / folder)


def the(folder: str) -> Node:
    """The one manifest of a folder."""
    (document,) = built(folder)
    return document


def cluster_of(document: Node) -> Node:
    return document["spec"].get("rayClusterSpec", document["spec"])


def ray_pods(document: Node) -> list[Node]:
    """The specifications of head and workers."""
    cluster = cluster_of(document)
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def pods(document: Node) -> list[Node]:
    """The specifications of all pods that come of a manifest."""
    if document["kind"] == "Pod":
        return [document["spec"]]
    if document["kind"] == "RayJob":
        return [*ray_pods(document), document["spec"]["submitterPodTemplate"]["spec"]]
    return ray_pods(document) if document["kind"] == "RayCluster" else []


def all_pods() -> Iterator[tuple[str, Node]]:
    for folder in FOLDERS:
        for document in built(folder):
            for pod in pods(document):
                yield folder, pod


def changed(change: Callable[[Node], object], folder: str = "overlays/kind") -> Node:
    document = copy.deepcopy(the(folder))
    change(document)
    return document


def size(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


# Kustomize


def kustomize() -> list[str] | None:
    """The command that builds a folder, of a kustomize that knows components and wildcards; None: none is there."""
    if path := shutil.which("kustomize"):
        return [path, "build"]
    if path := shutil.which("kubectl"):
        told = subprocess.run([path, "version", "--client"], capture_output=True, text=True, check=False).stdout
        if (found := re.search(r"Kustomize Version: v(\d+)", told)) and int(found[1]) >= 5:
            return [path, "kustomize"]
    return None


def users_overlay(folder: Path, overlay: str) -> Path:
    """The overlay that k8s/README.md tells a user to write, of another of ours."""
    text, *_ = re.findall(r"```yaml\n(.*?)```", (K8S / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    settings = yaml.safe_load(text.replace("../k8s", os.path.relpath(K8S, folder)).replace("overlays/cpu", overlay))
    if overlay.endswith("/cluster"):
        del settings["patches"]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.skipif(kustomize() is None, reason="neither kustomize nor a kubectl with kustomize 5 is there")
def test_kustomize_prints_what_the_tests_take_for_it(tmp_path: Path) -> None:
    for folder in (*(K8S / name for name in FOLDERS), users_overlay(tmp_path, "overlays/cpu")):
        command = [*(kustomize() or []), str(folder)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(printed)}
        assert found == {(one["kind"], one["metadata"]["name"]): one for one in build(folder)}


@pytest.mark.parametrize("overlay", ["overlays/cpu", "overlays/gpu/cluster"])
def test_a_users_overlay_names_image_queue_and_data(overlay: str, tmp_path: Path) -> None:
    (document,) = build(users_overlay(tmp_path, overlay))
    if document["kind"] == "RayJob":
        assert document["metadata"]["name"] == "fedavg"
        assert cluster_of(document)["workerGroupSpecs"][0]["replicas"] == 8
        require_command(document["spec"]["entrypoint"])
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rayfl"
    for pod in pods(document):
        assert pod["containers"][0]["image"].startswith("registry.example.org/team/rayfl@sha256:0000")
    claim = {"claimName": "rayfl-data", "readOnly": True}
    for pod in ray_pods(document):
        (data,) = [volume for volume in pod["volumes"] if volume["name"] == "data"]
        assert data == {"name": "data", "persistentVolumeClaim": claim}
        assert "tmp" in {volume["name"] for volume in pod["volumes"]}
    assert complaints(document) == []


def test_what_the_composer_does_not_know_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: x-\n")
    with refused(names=["namePrefix"], error=ValueError):
        build(tmp_path)


def test_an_overlay_has_one_manifest_and_no_claim() -> None:
    # Deleting a job or a cluster by its folder must not delete results.
    assert {folder: the(folder)["kind"] for folder in JOBS} == dict.fromkeys(JOBS, "RayJob")
    assert {folder: the(folder)["kind"] for folder in CLUSTERS} == dict.fromkeys(CLUSTERS, "RayCluster")
    for job, cluster in zip(JOBS, CLUSTERS, strict=True):
        assert cluster_of(the(job)) == the(cluster)["spec"]


# Schemas


@pytest.mark.parametrize("folder", [*JOBS, *CLUSTERS])
def test_manifests_are_valid_under_kuberays_schema(folder: str) -> None:
    document = the(folder)
    assert document["apiVersion"] == "ray.io/v1"
    assert errors(document["spec"], kuberay_schema.small_schema(document["kind"])) == []


@needs_crds
@pytest.mark.parametrize("folder", ["overlays/gpu", "overlays/gpu/cluster"])
def test_manifests_are_valid_under_the_whole_crds(folder: str) -> None:
    document = the(folder)
    assert errors(document, kuberay_schema.whole_schema(CRDS, document["kind"])) == []


@needs_crds
def test_the_small_schema_is_what_the_crds_say() -> None:
    small = yaml.safe_load(kuberay_schema.SCHEMA.read_text(encoding="utf-8"))
    assert small == kuberay_schema.reduced_crds(CRDS)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m: m["spec"].update(entrypiont="x"), ""),
        (lambda m: m["spec"].update(shutdownAfterJobFinishes="yes"), "shutdownAfterJobFinishes"),
        (lambda m: cluster_of(m)["authOptions"].update(mode="on"), "rayClusterSpec.authOptions.mode"),
        (
            lambda m: cluster_of(m)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
            "rayClusterSpec.headGroupSpec.rayStartParams.num-cpus",
        ),
        (lambda m: cluster_of(m)["workerGroupSpecs"][0].pop("groupName"), "rayClusterSpec.workerGroupSpecs.0"),
    ],
    ids=["unknown field", "wrong type", "unknown value", "number in rayStartParams", "missing name"],
)
def test_the_schema_refuses_mistakes(change: Callable[[Node], object], where: str) -> None:
    (error,) = errors(changed(change)["spec"], kuberay_schema.small_schema("RayJob"))
    assert error.startswith(f"{where}: ")


def as_pod(specification: Node) -> Node:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": specification}


def test_kubernetes_takes_every_pod_and_every_manifest_of_its_own() -> None:
    own = [one for folder in ("setup", "outside", *READERS) for one in built(folder)]
    kinds = ["NetworkPolicy"] * 2 + ["PersistentVolumeClaim"] * 3 + ["Pod"] * 3
    assert sorted(one["kind"] for one in own) == kinds
    for document in (*own, *(as_pod(pod) for _, pod in all_pods())):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda pod: pod["containers"][0].update(secretContext={}),
        lambda pod: pod["containers"][0].pop("name"),
        lambda pod: pod["securityContext"].update(runAsUser="1000"),
    ],
)
def test_kubernetes_schemas_refuse_mistakes(change: Callable[[Node], object]) -> None:
    pod = copy.deepcopy(the(READERS[0]))
    change(pod["spec"])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


# The operator's rules


@pytest.mark.parametrize("folder", [*JOBS, *CLUSTERS])
def test_the_operator_takes_the_manifests(folder: str) -> None:
    assert complaints(the(folder)) == []


def _autoscaled(document: Node) -> None:
    spec = cluster_of(document)
    spec.update(enableInTreeAutoscaling=True, autoscalerOptions={"version": "v2"})
    spec["workerGroupSpecs"][0]["template"]["spec"]["restartPolicy"] = "Always"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m["metadata"].update(name="x" * 48), "name"),
        (lambda m: m["metadata"].update(name="1st"), "name"),
        (lambda m: m["spec"].update(deletionStrategy={}), "shutdownAfterJobFinishes excludes deletionStrategy"),
        (lambda m: m["spec"].update(shutdownAfterJobFinishes=False), "ttlSecondsAfterFinished needs"),
        (lambda m: m["spec"].update(ttlSecondsAfterFinished=-1), "ttlSecondsAfterFinished must be"),
        (lambda m: m["spec"].update(clusterSelector={"ray.io/cluster": "rayfl"}), "exactly one of"),
        (lambda m: m["spec"].update(submissionMode="SidecarMode"), "SidecarMode"),
        (lambda m: m["spec"].update(submissionMode="InteractiveMode"), "InteractiveMode excludes backoffLimit"),
        (lambda m: m["spec"]["submitterPodTemplate"]["spec"].pop("restartPolicy"), "the submitter's restartPolicy"),
        (lambda m: m["spec"].update(activeDeadlineSeconds=0), "activeDeadlineSeconds"),
        (lambda m: m["spec"].update(runtimeEnvYAML="- pip"), "runtimeEnvYAML"),
        (lambda m: cluster_of(m).update(rayVersion="2.51.9"), "token authentication"),
        (lambda m: cluster_of(m)["workerGroupSpecs"].append(cluster_of(m)["workerGroupSpecs"][0]), "groupName"),
        (lambda m: cluster_of(m)["workerGroupSpecs"][0].update(replicas=33), "group workers: minReplicas"),
        (lambda m: cluster_of(m)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "group head"),
        (_autoscaled, "autoscaler v2 needs restartPolicy Never"),
    ],
)
def test_the_operators_rules_find_what_breaks_them(change: Callable[[Node], object], complaint: str) -> None:
    (found,) = complaints(changed(change))
    assert found.startswith(complaint)


# Every pod


@pytest.mark.parametrize("folder", JOBS)
def test_shared_memory_has_the_size_of_rays_object_store(folder: str) -> None:
    # Ray's default: 30 % of the memory, but at most 95 % of /dev/shm, which here must not be what limits it.
    for pod in ray_pods(the(folder)):
        memory = size(pod["containers"][0]["resources"]["limits"]["memory"])
        (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        assert 0.3 * memory <= 0.95 * size(shm["sizeLimit"]) <= 0.4 * memory


def test_probes_are_the_operators() -> None:
    # A probe of ours would take the place of the one that KubeRay makes for its Ray.
    for _, pod in all_pods():
        assert not {"livenessProbe", "readinessProbe", "startupProbe"} & pod["containers"][0].keys()


@pytest.mark.parametrize("folder", [*JOBS, *CLUSTERS])
def test_ray_is_the_version_of_the_constraints_and_asks_for_a_token(folder: str) -> None:
    cluster = cluster_of(the(folder))
    assert cluster["rayVersion"] == str(constraints()["ray"])
    assert cluster["authOptions"] == {"mode": "token"}


def test_images_are_the_variant_of_the_overlay() -> None:
    images = {folder: {pod["containers"][0]["image"] for pod in pods(the(folder))} for folder in (*JOBS, READERS[0])}
    cpu, cuda = {"rayfl:0.1.0"}, {"rayfl:0.1.0-cuda"}
    assert images == {"overlays/kind": cpu, "overlays/cpu": cpu, "overlays/gpu": cuda, READERS[0]: cpu}
    kind = {pod["containers"][0]["imagePullPolicy"] for pod in pods(the("overlays/kind"))}
    assert kind == {"Never"}


def test_the_gpu_overlays_workers_have_a_gpu_each() -> None:
    head, workers = ray_pods(the("overlays/gpu"))
    assert workers["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert [toleration["key"] for toleration in workers["tolerations"]] == ["nvidia.com/gpu"]
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]


def test_only_head_and_reader_mount_the_overlays_own_claim() -> None:
    claims = [one["metadata"]["name"] for one in built("setup") if one["kind"] == "PersistentVolumeClaim"]
    assert sorted(claims) == sorted(f"rayfl-runs-{job.removeprefix('overlays/')}" for job in JOBS)
    for folder in (*JOBS, *CLUSTERS, *READERS):
        writes, *others = pods(the(folder))
        (volume,) = [volume for volume in writes["volumes"] if "persistentVolumeClaim" in volume]
        assert volume["persistentVolumeClaim"]["claimName"] == f"rayfl-runs-{folder.split('/')[1]}"
        mounts = {mount["name"]: mount for mount in writes["containers"][0]["volumeMounts"]}
        assert mounts["runs"]["mountPath"] == f"{WORKDIR}/runs"
        assert mounts["runs"].get("readOnly", False) is (folder in READERS)
        assert not [volume for pod in others for volume in pod["volumes"] if "persistentVolumeClaim" in volume]


def test_the_network_policy_covers_every_pod() -> None:
    (policy,) = [one["spec"] for one in built("setup") if one["kind"] == "NetworkPolicy"]
    covered = policy["podSelector"]["matchLabels"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    for folder in (*JOBS, *CLUSTERS):
        document = the(folder)
        cluster = cluster_of(document)
        templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
        templates += [document["spec"]["submitterPodTemplate"]] if document["kind"] == "RayJob" else []
        for template in templates:
            assert covered.items() <= template["metadata"]["labels"].items()
    assert covered.items() <= the(READERS[0])["metadata"]["labels"].items()
    assert the("outside")["spec"]["podSelector"] == policy["podSelector"]
    # They speak to each other on all ports, and are asked by the operator on the dashboard's.
    assert {"from": [{"podSelector": policy["podSelector"]}]} in policy["ingress"]
    assert {"to": [{"podSelector": policy["podSelector"]}]} in policy["egress"]
    (operator,) = [rule for rule in policy["ingress"] if "kuberay-operator" in str(rule)]
    head = ray_pods(the("overlays/kind"))[0]["containers"][0]
    dashboard = {port["name"]: port["containerPort"] for port in head["ports"]}["dashboard"]
    assert operator["ports"] == [{"protocol": "TCP", "port": dashboard}]
    # From one namespace alone: anybody may give a pod of theirs the operator's label.
    install = "helm install kuberay-operator kuberay/kuberay-operator --version 1.7.0 --namespace"
    (namespace,) = re.findall(f"{install} ([a-z]+) ", (K8S / "README.md").read_text(encoding="utf-8"))
    (allowed,) = operator["from"]
    assert allowed["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    # Metrics are read within the namespace, and names asked of the cluster's own servers.
    (metrics,) = [rule for rule in policy["ingress"] if "reads-metrics" in str(rule)]
    assert [set(one) for one in metrics["from"]] == [{"podSelector"}] and len(policy["ingress"]) == 3
    (names,) = [rule for rule in policy["egress"] if "ports" in rule]
    (servers,) = names["to"]
    assert servers["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kube-system"}
    assert servers["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}
    assert {port["port"] for port in names["ports"]} == {53} and len(policy["egress"]) == 2


# The job


@pytest.mark.parametrize("folder", JOBS)
def test_every_attempt_of_a_job_is_the_same_command_that_goes_on(folder: str) -> None:
    spec = the(folder)["spec"]
    assert spec["backoffLimit"] == 3 and not {"activeDeadlineSeconds", "preRunningDeadlineSeconds"} & spec.keys()
    assert spec["shutdownAfterJobFinishes"] is True
    runtime = require_command(spec["entrypoint"]).runtime
    assert runtime.device_name == ("cuda" if folder == "overlays/gpu" else "cpu")


def require_command(command: str) -> Experiment:
    """The experiment of a command that a scheduler may repeat, on the image's files and the claim."""
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("rayfl", "run")
    given = run.make_context("run", arguments).params
    assert given["resumed"] is True
    assert given["output"].parent == Path(WORKDIR) / "runs"
    return read(ROOT / given["file"].relative_to(WORKDIR), given["overrides"])


# The text


def test_the_readme_names_folders_that_are_there() -> None:
    text = (K8S / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"-k (k8s/[\w/]+)", text))
    assert {f"k8s/{folder}" for folder in ("setup", READERS[0], *JOBS)} <= named
    assert [folder for folder in named if not (ROOT / folder / "kustomization.yaml").is_file()] == []
    assert "kubectl apply -f k8s" not in text and "kubectl delete -f k8s" not in text
