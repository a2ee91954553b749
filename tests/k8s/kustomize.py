"""What `kustomize build` prints of the folders in k8s, in plain Python: kustomize is no package of Python's.

It knows what those folders use, in kustomize's order: resources, components, patches (RFC 6902), images, replacements.
Anything else is an error, so that nothing is left out unseen.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# Any: a manifest is whatever its YAML holds.
Node = Any

LOCAL = "config.kubernetes.io/local-config"
"""The annotation of what kustomize reads and does not print."""

_KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images", "replacements"}


def build(folder: Path) -> list[Node]:
    """The manifests that `kustomize build` prints of a folder, in no particular order."""
    found = _accumulated(folder, [])
    return [one for one in found if (one["metadata"].get("annotations") or {}).get(LOCAL) != "true"]


def _accumulated(folder: Path, below: list[Node]) -> list[Node]:
    """The manifests of a folder and of those that it names. `below`: what a component works on."""
    (settings,) = _documents(folder / "kustomization.yaml")
    if unknown := settings.keys() - _KNOWN:
        raise ValueError(f"{folder}/kustomization.yaml: {sorted(unknown)} is nothing that this knows")
    found = list(below)
    for name in settings.get("resources", []):
        path = folder / name
        found += _accumulated(path, []) if path.is_dir() else _documents(path)
    identities = [(one["kind"], one["metadata"]["name"]) for one in found]
    if len(set(identities)) < len(identities):
        raise ValueError(f"{folder}: a manifest is there twice: {identities}")
    for name in settings.get("components", []):
        found = _accumulated(folder / name, found)
    for patch in settings.get("patches", []):
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text(encoding="utf-8")
        for manifest in _selected(found, patch["target"]):
            for operation in yaml.safe_load(text):
                _apply(manifest, operation)
    for image in settings.get("images", []):
        _rename(found, image)
    for replacement in settings.get("replacements", []):
        _replace(found, replacement)
    return found


def _documents(path: Path) -> list[Node]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _selected(manifests: list[Node], selector: Node) -> Iterator[Node]:
    """What a selector's group, kind and name select, which are regular expressions of the whole word."""
    if unknown := selector.keys() - {"group", "kind", "name"}:
        raise ValueError(f"a selector's {sorted(unknown)} is nothing that this knows")
    for manifest in manifests:
        group = manifest["apiVersion"].rpartition("/")[0]
        own = {"group": group, "kind": manifest["kind"], "name": manifest["metadata"]["name"]}
        if all(re.fullmatch(pattern, own[key]) for key, pattern in selector.items()):
            yield manifest


def _apply(manifest: Node, operation: Node) -> None:
    """Apply one operation of RFC 6902: add or replace."""
    keys = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    parent = manifest
    for key in keys[:-1]:
        parent = parent[int(key)] if isinstance(parent, list) else parent[key]
    last, value = keys[-1], copy.deepcopy(operation["value"])
    if operation["op"] == "add" and isinstance(parent, list):
        parent.insert(len(parent) if last == "-" else int(last), value)
    elif operation["op"] == "add":
        parent[last] = value
    elif operation["op"] == "replace":
        place = int(last) if isinstance(parent, list) else last
        # Without this line Python would add what is not there.
        parent[place]
        parent[place] = value
    else:
        raise ValueError(f"{operation['op']} is nothing that this knows")


def _rename(node: Node, image: Node) -> None:
    """Give every container's image of a name its new name, tag and digest."""
    if isinstance(node, list):
        for one in node:
            _rename(one, image)
    elif isinstance(node, dict):
        for container in node.get("containers", []) if isinstance(node.get("containers"), list) else []:
            name, _, tag = container["image"].partition(":")
            if name == image["name"]:
                tag = image.get("newTag", tag)
                # A digest without a new tag takes the place of the old one.
                digest = f"@{image['digest']}" if "digest" in image else ""
                tag = "" if digest and "newTag" not in image else tag
                container["image"] = image.get("newName", name) + (f":{tag}" if tag else "") + digest
        for one in node.values():
            _rename(one, image)


def _replace(manifests: list[Node], replacement: Node) -> None:
    """Put a copy of the source's field into the targets' fields."""
    (source,) = _selected(manifests, {key: replacement["source"][key] for key in ("kind", "name")})
    value = source
    for key in replacement["source"]["fieldPath"].split("."):
        value = value[key]
    for target in replacement["targets"]:
        if target["options"] != {"create": True}:
            raise ValueError("a replacement without create is nothing that this knows")
        for manifest in _selected(manifests, target["select"]):
            for path in target["fieldPaths"]:
                _fill(manifest, path.split("."), value)


def _fill(node: Node, keys: list[str], value: Node) -> None:
    first, *rest = keys
    if first == "*":
        for one in node:
            _fill(one, rest, value)
    elif rest:
        _fill(node.setdefault(first, {}), rest, value)
    else:
        node[first] = copy.deepcopy(value)
