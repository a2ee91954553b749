"""Checkpoints of a cut run: whatever is odd in the newest is passed over, and the run ends with the same bits."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.hostile.case import Case, Content
from tests.hostile.kinds.damage import (
    DEEP_JSON,
    DEEP_TABLES,
    GARBAGE,
    edited,
    endless,
    fifo,
    flipped,
    folder,
    gone,
    half,
    no_folder,
)

NEWEST, OLDER = "run/checkpoints/00000004", "run/checkpoints/00000002"
STATES = "states-0000.safetensors"


def passed_over(
    name: str, content: Content, path: str = "manifest.json", in_suite: bool = False, in_process: bool = False
) -> Case:
    """The newest checkpoint with one file changed: a notice names it, and the run goes on from the one before."""
    return Case(
        "checkpoint",
        name,
        ["resume", "run"],
        ["00000004"],
        {f"{NEWEST}/{path}": content},
        start="cut",
        code=0,
        may_write=["run"],
        same_bits=True,
        in_suite=in_suite,
        in_process=in_process,
    )


# Any: JSON.
def manifest(name: str, /, in_suite: bool = False, **changes: Any) -> Case:
    """Another manifest, whose own checksum fits."""
    return passed_over(f"manifest: {name}", other_manifest(**changes), in_suite=in_suite)


# Any: JSON.
def other_manifest(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        edited(**changes)(path)
        sign_manifest(path)

    return edit


# Any: the layout of a state file, as JSON.
def layout(name: str, change: Callable[[Any], Any], signed: bool = True, in_suite: bool = False) -> Case:
    """A shard whose layout is another; `signed`: the manifest's checksums are made to fit, so that it is read."""

    def edit(path: Path) -> None:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
            found = json.loads((file.metadata() or {})["layout"])
        text = change(found)
        save_file(arrays, path, {"layout": text if isinstance(text, str) else json.dumps(text)})
        if signed:
            sign(path)

    return passed_over(f"layout: {name}", edit, STATES, in_suite=in_suite)


def arrays(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Case:
    """A shard whose arrays are others."""

    def edit(path: Path) -> None:
        with safe_open(path, framework="numpy") as file:
            found = {key: change(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
            metadata = file.metadata()
        save_file(found, path, metadata)

    return passed_over(f"arrays: {name}", edit, STATES)


def sign(path: Path) -> None:
    """Make the manifest fit to a changed file, and to itself."""
    place = path.parent / "manifest.json"
    about = json.loads(place.read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    about["files"][path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    place.write_text(json.dumps(about))
    sign_manifest(place)


def sign_manifest(place: Path) -> None:
    """Put a manifest's own checksum into it."""
    about = json.loads(place.read_text())
    about.pop("sha256", None)
    about["sha256"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    place.write_text(json.dumps(about))


def exchanged(path: Path) -> None:
    """The server's state of the checkpoint before."""
    path.write_bytes((path.parents[1] / "00000002" / path.name).read_bytes())


def no_shards(path: Path) -> None:
    about = json.loads(path.read_text())
    about["files"] = {name: file for name, file in about["files"].items() if not name.startswith("states")}
    path.write_text(json.dumps(about))
    sign_manifest(path)


def both(content: Content) -> dict[str, Content]:
    return {f"{place}/manifest.json": content for place in (NEWEST, OLDER)}


# Any: JSON.
def codec(name: str, **settings: Any) -> Callable[[Any], Any]:
    """Every client has a packet of this codec."""
    return lambda found: {
        client: {"tree": {"x": {"packet": {"codec": name, "settings": settings}, "parts": {}}}} for client in found
    }


# Any: JSON.
def deep(found: Any) -> str:
    return '{"0":' + '{"tree":{"a":' * 50_000 + '{"array":"0"}' + "}}" * 50_000 + "}"


OTHER_FILE = {"server.safetensors": {"bytes": 1, "sha256": "0" * 64}}

CASES = [
    passed_over("valid but for a flipped bit", flipped, STATES, in_process=True),
    Case("checkpoint", "valid", ["resume", "run"], start="cut", code=0, may_write=["run"], same_bits=True),
    *[
        passed_over(f"{name} {word}", content, name)
        for name in ("manifest.json", "server.safetensors", STATES)
        for word, content in (
            ("gone", gone),
            ("half", half),
            ("empty", b""),
            ("garbage", GARBAGE),
            ("flipped", flipped),
            ("zeros", b"\0" * 999),
        )
    ],
    passed_over("manifest.json a folder", folder),
    passed_over("manifest.json a FIFO", fifo, in_suite=True),
    passed_over("states a FIFO", fifo, STATES),
    passed_over("states a folder", folder, STATES),
    passed_over("manifest: deep lists", DEEP_JSON, in_suite=True),
    passed_over("manifest: deep tables", DEEP_TABLES),
    passed_over("manifest: a list", "[]"),
    passed_over("manifest: null", "null"),
    passed_over("manifest: an empty table", "{}"),
    passed_over("manifest: a number of 10,000 digits", '{"format": ' + "9" * 10_000 + "}"),
    passed_over("manifest: no states", no_shards, in_suite=True),
    passed_over("manifest: another round, and its checksum as it was", edited(round=2)),
    passed_over("manifest: of another run, and its checksum as it was", edited(identity="0" * 64)),
    manifest("no files", files={}),
    manifest("files a list", files=[]),
    manifest("files null", files=None),
    manifest("one file", files=OTHER_FILE),
    manifest("a file elsewhere", files={"../../experiment.json": {"bytes": 1, "sha256": "0"}}),
    manifest("a file that is a number", files={"server.safetensors": 5}),
    manifest("rows less", rows={"rounds": 4, "clients": 1, "metrics": 1}),
    manifest("rows none", rows={}),
    manifest("rows text", rows={"rounds": "x"}),
    manifest("rows a list", rows=[1]),
    manifest("round 2", round=2),
    manifest("round text", round="4"),
    manifest("round a fraction", round=4.0),
    passed_over("the server's state of another round", exchanged, "server.safetensors", in_suite=True),
    layout("no JSON", lambda found: "{"),
    layout("a list", lambda found: []),
    layout("null", lambda found: None),
    layout("deep", deep, in_suite=True),
    layout("clients that are no numbers", lambda found: {f"x{client}": one for client, one in found.items()}),
    layout("clients below zero", lambda found: {f"-{int(client) + 1}": one for client, one in found.items()}),
    layout("clients beyond the last", lambda found: {f"{int(client) + 99}": one for client, one in found.items()},
           signed=False),
    layout("no clients", lambda found: {}),
    layout("an array that is not there", lambda found: {client: {"tree": {"a": {"array": "x"}}} for client in found}),
    layout("nothing of a client", lambda found: {client: {} for client in found}),
    layout("a client that is a number", lambda found: dict.fromkeys(found, 5)),
    layout("an unknown codec", codec("absent.Codec")),
    layout("a codec that is a function", codec("base.zeros_of")),
    layout("a codec of Python", codec("os:system")),
    layout("a codec without settings", codec("dense.DenseCodec")),
    layout("a codec with other settings", codec("dense.DenseCodec", shape=5)),
    layout("a codec of wrong types", codec("dense.DenseCodec", shapes=5, dtype=[]), signed=False),
    layout("bits of a shape of 10^13", lambda found: {
        client: {"tree": {"a": {"bits": f"{client}", "shape": [10**13]}}} for client in found}),
    arrays("float64", lambda array: array.astype(np.float64)),
    arrays("whole numbers", lambda array: array.astype(np.int8)),
    arrays("empty", lambda array: array[:0]),
    arrays("doubled", lambda array: np.concatenate([array, array])),
    *[
        Case(
            "checkpoint",
            f"{path} a device",
            ["resume", "run"],
            [path, "link"],
            {f"{NEWEST}/{path}": endless},
            start="cut",
            may_write=["run/lock"],
        )
        for path in ("manifest.json", STATES)
    ],
    Case(
        "checkpoint",
        "both manifests garbage: from the start",
        ["resume", "run"],
        ["00000004", "00000002"],
        both(GARBAGE),
        start="cut",
        code=0,
        may_write=["run"],
        same_bits=True,
    ),
    Case(
        "checkpoint",
        "the format of another version",
        ["resume", "run"],
        ["00000004", "format"],
        {f"{NEWEST}/manifest.json": other_manifest(format=99)},
        start="cut",
        may_write=["run/lock"],
    ),
    Case(
        "checkpoint",
        "checkpoints a file",
        ["resume", "run"],
        [],
        {"run/checkpoints": no_folder},
        start="cut",
        code=0,
        may_write=["run"],
        same_bits=True,
    ),
    Case(
        "checkpoint",
        "a checkpoint that is a file",
        ["resume", "run"],
        [],
        {"run/checkpoints/00000005": "in the way"},
        start="cut",
        code=0,
        may_write=["run"],
        same_bits=True,
    ),
    *[
        Case(
            "checkpoint",
            f"a checkpoint called {name}",
            ["resume", "run"],
            [],
            {f"run/checkpoints/{name}/manifest.json": "{}"},
            start="cut",
            code=0,
            may_write=["run"],
            same_bits=True,
        )
        for name in ("notes", "-0000004", "4", "1e3", "00000005.partial")
    ],
    Case(
        "checkpoint",
        "a checkpoint of round 10^30",
        ["resume", "run"],
        [],
        {f"run/checkpoints/{10**30}/manifest.json": "{}"},
        start="cut",
        code=0,
        may_write=["run"],
        same_bits=True,
    ),
]  # fmt: skip
