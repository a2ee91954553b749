"""Every pod passes Kubernetes' pod security 'restricted', writes to its volumes alone and has no account."""

import copy
from collections.abc import Callable

import pytest

from tests.k8s.image import WORKDIR, instructions
from tests.k8s.pod_security import violations
from tests.k8s.test_manifests import READERS, Node, all_pods, the


def test_every_pod_passes_pod_security_restricted() -> None:
    found = list(all_pods())
    # Head, workers and submitter of three jobs, head and workers of three clusters, and three readers.
    assert len(found) == 3 * 3 + 3 * 2 + 3
    for folder, pod in found:
        # The operator puts a container in front of a worker's, which waits for the head with the worker's own rights.
        rights = pod["containers"][0]["securityContext"]
        waiting = {**pod, "initContainers": [{"name": "wait-gcs-ready", "securityContext": rights}]}
        assert violations(waiting) == [], folder


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        (lambda pod: pod["securityContext"].pop("seccompProfile"), "ray: seccompProfile"),
        (lambda pod: pod["securityContext"].pop("runAsNonRoot"), "ray: runAsNonRoot"),
        (lambda pod: pod["containers"][0]["securityContext"].pop("capabilities"), "ray: capabilities"),
        (lambda pod: pod["containers"][0]["securityContext"].pop("allowPrivilegeEscalation"), "ray: allowPrivilege"),
        (lambda pod: pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}}), "volume host: hostPath"),
        (lambda pod: pod.update(hostNetwork=True), "hostNetwork"),
        (lambda pod: pod["containers"][0].update(ports=[{"containerPort": 1, "hostPort": 1}]), "ray: hostPort"),
        (lambda pod: pod.update(initContainers=[{"name": "init"}]), "init: allowPrivilegeEscalation"),
    ],
)
def test_pod_security_finds_what_breaks_it(change: Callable[[Node], object], violation: str) -> None:
    pod = copy.deepcopy(the(READERS[0])["spec"])
    change(pod)
    assert violations(pod)[0].startswith(violation)


def test_a_pod_writes_to_its_volumes_alone_and_has_no_account() -> None:
    (user,) = instructions("USER")
    for folder, pod in all_pods():
        assert pod["automountServiceAccountToken"] is False
        security, (container,) = pod["securityContext"], pod["containers"]
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
        assert security["fsGroup"] == security["runAsGroup"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        # Ray's sessions and what it spills; its object store; the home, with the cache of datasets.
        assert {"/tmp": "tmp", "/dev/shm": "shm", "/home/rayfl": "cache", f"{WORKDIR}/data": "data"}.items() <= (
            mounts.items()
        )
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}, folder
        assert container["workingDir"] == WORKDIR
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        assert pod["imagePullSecrets"] == [{"name": "rayfl-registry"}]
        # Ray reads its capacity from the limits; a request below them would promise what the node may not have.
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["requests"].keys()
