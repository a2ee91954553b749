"""KubeRay's schemas of RayCluster and RayJob, small enough to lie here, so that no test waits for the CRDs.

Of the CRDs, 2 MB, nine tenths describe a pod, and Kubernetes has schemas for that.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

SCHEMA = Path(__file__).with_name("kuberay-1.7.0.yaml")
KINDS = ("RayCluster", "RayJob")

CUT = {
    "autoscalerOptions",
    "deletionStrategy",
    "gcsFaultToleranceOptions",
    "headService",
    "historyServerOptions",
    "ingressOptions",
    "networkPolicy",
    "submitterPodTemplate",
    "template",
    "tlsOptions",
}
"""Fields whose content the small schemas do not describe: pods, and what no manifest here uses."""

# Any: a schema and a manifest are whatever their YAML holds.
Node = Any


def reduced_crds(folder: Path) -> Node:
    """The specifications' schemas by kind, made of the CRDs in a folder."""
    return {kind: _reduced(crd_schema(folder, kind)["properties"]["spec"]) for kind in KINDS}


def crd_schema(folder: Path, kind: str) -> Node:
    """The v1 schema of a kind from its CRD."""
    text = (folder / f"ray.io_{kind.lower()}s.yaml").read_text(encoding="utf-8")
    # The C loader takes a second for both, and the other one half a minute.
    document = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [version for version in document["spec"]["versions"] if version["name"] == "v1"]
    return version["schema"]["openAPIV3Schema"]


def _reduced(schema: Node) -> Node:
    if isinstance(schema, list):
        return [_reduced(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _reduced(value) for key, value in schema.items() if key not in ("description", "properties")}
    if "properties" in schema:
        fields = schema["properties"].items()
        kept["properties"] = {name: {"type": "object"} if name in CUT else _reduced(field) for name, field in fields}
    return kept


@cache
def small_schema(kind: str) -> Node:
    """The small schema of a kind's specification, such that a field it does not know is an error."""
    return strict(yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))[kind])


@cache
def whole_schema(folder: Path, kind: str) -> Node:
    """The schema of a kind from its CRD, such that a field it does not know is an error."""
    return strict(crd_schema(folder, kind))


def strict(schema: Node) -> Node:
    """The schema with unknown fields refused, where it lists the known ones."""
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
    """Where and how a document breaks a schema."""
    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]
