"""The manifests against KubeRay's CRDs, the operator's own rules, the image and each other."""

import copy
import importlib.util
import os
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import rayfl
from tests.k8s.operator_rules import complaints
from tests.test_packaging import constraints

ROOT = Path(__file__).resolve().parents[2]
CRDS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay"))
IMAGE = f"rayfl:{rayfl.__version__}"
needs_crds = pytest.mark.skipif(
    not (CRDS / "ray.io_rayclusters.yaml").is_file(),
    reason="KubeRay's CRDs are absent: KUBERAY_CRDS names a folder of ray.io_rayclusters.yaml and ray.io_rayjobs.yaml",
)

# Any: a manifest and a CRD are whatever their YAML holds.
Node = Any


def manifest(name: str) -> Node:
    (document,) = yaml.safe_load_all((ROOT / "k8s" / f"{name}.yaml").read_text(encoding="utf-8"))
    return document


def cluster(name: str) -> Node:
    return cluster_of(manifest(name))


def cluster_of(document: Node) -> Node:
    return document["spec"].get("rayClusterSpec", document["spec"])


def pods(name: str) -> list[Node]:
    groups = [cluster(name)["headGroupSpec"], *cluster(name)["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@cache
def crd(kind: str) -> Node:
    """The v1 schema of a kind, such that a field it does not know is an error."""
    document = yaml.safe_load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text(encoding="utf-8"))
    (version,) = [version for version in document["spec"]["versions"] if version["name"] == "v1"]
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema: Node) -> Node:
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    open_by_intent = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not open_by_intent:
        closed["additionalProperties"] = False
    return closed


def errors(document: Node, schema: Node) -> list[str]:
    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def changed(name: str, change: Callable[[Node], object]) -> Node:
    document = copy.deepcopy(manifest(name))
    change(document)
    return document


@needs_crds
@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_manifests_are_valid_under_kuberays_schema(name: str) -> None:
    document = manifest(name)
    assert document["apiVersion"] == "ray.io/v1"
    assert errors(document, crd(document["kind"])) == []


@needs_crds
def test_the_reader_is_a_valid_pod() -> None:
    # A pod's specification is part of the CRD, as the template of the head group.
    group = crd("RayCluster")["properties"]["spec"]["properties"]["headGroupSpec"]
    pod = group["properties"]["template"]["properties"]["spec"]
    assert errors(manifest("reader")["spec"], pod) == []


@needs_crds
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m: m["spec"].update(entrypiont="x"), "spec"),
        (lambda m: m["spec"].update(shutdownAfterJobFinishes="yes"), "spec.shutdownAfterJobFinishes"),
        (lambda m: cluster_of(m)["authOptions"].update(mode="on"), "spec.rayClusterSpec.authOptions.mode"),
        (
            lambda m: cluster_of(m)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
            "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus",
        ),
        (
            lambda m: cluster_of(m)["headGroupSpec"]["template"]["spec"]["containers"][0].pop("name"),
            "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0",
        ),
    ],
    ids=["unknown field", "wrong type", "unknown value", "number in rayStartParams", "missing name"],
)
def test_the_schema_refuses_mistakes(change: Callable[[Node], object], where: str) -> None:
    (error,) = errors(changed("rayjob", change), crd("RayJob"))
    assert error.startswith(f"{where}: ")


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_the_operator_takes_the_manifests(name: str) -> None:
    assert complaints(manifest(name)) == []


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
        (lambda m: m["spec"].update(clusterSelector={"ray.io/cluster": "rayfl"}), "exactly one of"),
        (lambda m: m["spec"].update(submissionMode="SidecarMode", submitterConfig={}), "SidecarMode"),
        (lambda m: m["spec"].update(activeDeadlineSeconds=0), "activeDeadlineSeconds"),
        (lambda m: m["spec"].update(runtimeEnvYAML="- pip"), "runtimeEnvYAML"),
        (lambda m: cluster_of(m).update(rayVersion="2.51.9"), "token authentication"),
        (lambda m: cluster_of(m)["workerGroupSpecs"].append(cluster("rayjob")["workerGroupSpecs"][0]), "groupName"),
        (lambda m: cluster_of(m)["workerGroupSpecs"][0].update(replicas=3), "group cpu: minReplicas"),
        (lambda m: cluster_of(m)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "group head"),
        (_autoscaled, "autoscaler v2 needs restartPolicy Never"),
    ],
)
def test_the_operators_rules_find_what_breaks_them(change: Callable[[Node], object], complaint: str) -> None:
    (found,) = complaints(changed("rayjob", change))
    assert found.startswith(complaint)


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_ray_is_the_version_of_the_constraints_that_the_image_installs(name: str) -> None:
    assert cluster(name)["rayVersion"] == str(constraints()["ray"])
    assert "-c constraints.txt" in dockerfile()["RUN"][-1]
    assert "ray" not in dockerfile()["FROM"][0]


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_every_pod_runs_the_image_as_its_user_with_its_folder_and_a_token(name: str) -> None:
    (user,), (folder,) = dockerfile()["USER"], dockerfile()["WORKDIR"]
    assert cluster(name)["authOptions"] == {"mode": "token"}
    for pod in pods(name):
        security = pod["securityContext"]
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
        assert security["runAsNonRoot"] and security["fsGroup"] == security["runAsGroup"]
        (container,) = pod["containers"]
        assert (container["image"], container["workingDir"]) == (IMAGE, folder)
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        # Ray reads its capacity from the limits; a request below them would promise what the node may not have.
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_gpu_group_has_gpus_and_starts_empty() -> None:
    group = {group["groupName"]: group for group in cluster("raycluster")["workerGroupSpecs"]}["gpu"]
    assert (group["replicas"], group["minReplicas"]) == (0, 0)
    pod = group["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu"]


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "reader"])
def test_runs_are_on_the_claim_where_the_image_has_its_runs_folder(name: str) -> None:
    pod = manifest("reader")["spec"] if name == "reader" else pods(name)[0]
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["mountPath"] == f"{dockerfile()['WORKDIR'][0]}/runs"
    assert volume["persistentVolumeClaim"]["claimName"] == manifest("storage")["metadata"]["name"]
    assert container["image"] == IMAGE


def test_the_jobs_entrypoint_is_there() -> None:
    spec = manifest("rayjob")["spec"]
    python, option, module, experiment = shlex.split(spec["entrypoint"])
    assert (python, option) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    assert (ROOT / experiment).is_file()
    assert spec["shutdownAfterJobFinishes"] is True


def dockerfile() -> dict[str, list[str]]:
    """The instructions of the Dockerfile and their arguments, continued lines joined, in order."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8"))
    instructions: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            instructions.setdefault(word, []).append(rest)
    return instructions


def test_the_image_holds_the_packages_and_is_named_as_the_manifests_name_it() -> None:
    copied = [line.split() for line in dockerfile()["COPY"]]
    for source in ("rayfl", "actors", "jobs"):
        assert [source, source] in copied
    assert all((ROOT / source).exists() for *sources, _ in copied for source in sources)
    for path in ("Dockerfile", "README.md"):
        assert f"docker build -f k8s/Dockerfile -t {IMAGE} ." in (ROOT / "k8s" / path).read_text(encoding="utf-8")
