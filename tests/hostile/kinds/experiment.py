"""Experiment files: syntax, names, types, bounds, and parts that do not fit each other."""

import os
from pathlib import Path
from typing import Any

from tests.hostile.case import FAILED, Case, Content, experiment


# Any: the tables that a case changes.
def mistake(name: str, /, *names: str, in_suite: bool = False, in_process: bool = False, **changes: Any) -> Case:
    """The demo with `changes`, refused in a sentence with `names`."""
    return text(name, experiment(**changes), *names, in_suite=in_suite, in_process=in_process)


def text(name: str, content: Content, *names: str, in_suite: bool = False, in_process: bool = False) -> Case:
    """A file of this content, refused in a sentence with `names`, or else with its own."""
    return Case(
        "experiment",
        name,
        ["run", "bad.toml"],
        names or ["bad.toml"],
        {"bad.toml": content},
        in_suite=in_suite,
        in_process=in_process,
    )


# Any: as above.
def method(name: str, /, *names: str, **hyper: Any) -> Case:
    return mistake(name, *names, method={"name": "fedavg", **hyper})


# Any: as above.
def clients(name: str, /, *names: str, **settings: Any) -> Case:
    return mistake(name, *names, clients={"count": 4, **settings})


# Any: as above.
def uplink(name: str, /, *names: str, **settings: Any) -> Case:
    return mistake(name, *names, uplink=settings)


# Any: the content of a file, or what makes it.
def started(name: str, weights: Any) -> Case:
    """A model that starts from such a file, refused with its name."""
    bad = experiment(model={"name": "mlp", "start": "bad.safetensors"})
    files = {"bad.toml": bad, "bad.safetensors": weights}
    return Case("experiment", name, ["run", "bad.toml"], ["bad.safetensors"], files)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere.toml")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


DEEP = 20_000
ODD: dict[str, Any] = {"a\nb": 3}
RAY = {"executor": "ray"}

CASES = [
    Case("experiment", "a valid one", ["run", "demo.toml", "--output", "run"], code=0, may_write=["run"]),
    Case(
        "experiment",
        "a valid one with a byte-order mark",
        ["run", "marked.toml", "--output", "run"],
        files={"marked.toml": "\ufeff" + experiment()},
        code=0,
        may_write=["run"],
    ),
    # Files.
    Case("experiment", "no such file", ["run", "absent.toml"], ["absent.toml"], in_process=True),
    Case("experiment", "a folder", ["run", "folder"], ["folder"], {"folder": Path.mkdir}),
    Case("experiment", "a FIFO", ["run", "bad.toml"], ["bad.toml"], {"bad.toml": os.mkfifo}, in_suite=True),
    Case("experiment", "a device", ["run", "/dev/zero"], ["/dev/zero"]),
    Case("experiment", "a link to nothing", ["run", "bad.toml"], ["bad.toml"], {"bad.toml": link_to_nothing}),
    Case("experiment", "a link to itself", ["run", "bad.toml"], ["bad.toml"], {"bad.toml": link_to_itself}),
    Case("experiment", "a name of 5,000 letters", ["run", "x" * 5000 + ".toml"], ["xxx"]),
    Case("experiment", "an empty name", ["run", ""], []),
    text("an empty file", "", "missing"),
    text("zeros", b"\0" * 100),
    text("bytes that are no text", b"\xff\xfe\x80" * 50),
    text("UTF-16", "rounds = 1".encode("utf-16")),
    text("no TOML", "rounds: 5\n", in_process=True),
    text("a key twice", "rounds = 1\nrounds = 2\n"),
    text("an open string", 'name = "x\n'),
    text("deep lists", "rounds = " + "[" * DEEP + "]" * DEEP),
    text("deep tables", "rounds = " + "{a=" * DEEP + "1" + "}" * DEEP),
    text("a deep dotted key", ".".join(["a"] * DEEP) + " = 1", in_suite=True),
    text("a deep table name", "[" + ".".join(["a"] * DEEP) + "]\nx = 1", "nested"),
    text("a number of 10,000 digits", "rounds = " + "9" * 10_000),
    text("a date", "rounds = 2020-01-01", "rounds"),
    # Numbers of the experiment.
    mistake("rounds missing", "rounds", rounds=None),
    mistake("rounds text", "rounds", rounds="5"),
    mistake("rounds zero", "rounds", rounds=0),
    mistake("rounds negative", "rounds", rounds=-3),
    mistake("rounds a fraction", "rounds", rounds=2.5),
    mistake("rounds true", "rounds", rounds=True),
    mistake("rounds a list", "rounds", rounds=[5]),
    mistake("rounds of 20 digits", "rounds", rounds=10**20),
    mistake("seed negative", "seed", seed=-1),
    mistake("seed a fraction", "seed", seed=0.5),
    mistake("seed of 200 digits", "seed", seed=10**200),
    mistake("a name that is a path", "name", name="../x"),
    mistake("a name with a null byte", "name", name="a\0b"),
    mistake("a name of 300 letters", "name", name="x" * 300, in_suite=True, in_process=True),
    mistake("an unknown key", "ronds", ronds=3),
    mistake("an unknown key with a line break", "unknown", **ODD),
    mistake("an unknown table", "methods", methods={"name": "fedavg"}),
    # Choices.
    mistake("an unknown method", "fedavgg", method="fedavgg"),
    mistake("a method without a name", "method.name", method={"lr": 0.1}),
    mistake("a method that is a number", "method", method=5),
    mistake("a method in a missing file", "absent.py", method="absent.py:Mine"),
    mistake("a method in a missing module", "absent_module", method="absent_module:Mine"),
    mistake("a file without a class", "mine.py", method="mine.py"),
    mistake("an unknown model", "mlpp", model="mlpp"),
    mistake("an unknown dataset", "digit", data="digit"),
    mistake("an unknown partition", "idd", partition="idd"),
    mistake("an unknown compressor", "topkk", uplink="topkk"),
    mistake("an unknown topology", "rnig", method="dpsgd", topology="rnig"),
    mistake("peers without a topology", "topology", method="dpsgd"),
    # Hyper-parameters.
    method("lr negative", "method.lr", lr=-1.0),
    method("lr text", "method.lr", lr="fast"),
    method("epochs zero", "method.epochs", epochs=0),
    method("epochs and steps", "method.epochs", epochs=1, steps=2),
    method("batch_size negative", "method.batch_size", batch_size=-1),
    method("momentum of adam", "method.momentum", optimizer="adam", momentum=0.9),
    method("an unknown schedule", "method.lr_schedule", lr_schedule="linear"),
    method("elastic in the method", "method.elastic", elastic=3),
    # Clients.
    clients("count zero", "clients.count", count=0),
    clients("count a billion", "clients.count", count=10**9),
    clients("count of 30 digits", "clients.count", count=10**30),
    clients("more a round than there are", "clients.per_round", per_round=30),
    clients("per_round and fraction", "clients.per_round", per_round=2, fraction=0.5),
    clients("a chance above one", "clients.upload_loss", upload_loss=1.5),
    clients("a speed below zero", "clients.uplink_mbps", uplink_mbps=-1.0),
    clients("a speed of no clients", "clients.uplink_mbps", uplink_mbps=[]),
    clients("take_first of none", "clients.take_first", take_first=0),
    clients("a deadline of zero", "clients.deadline_s", deadline_s=0.0),
    clients("availability an unknown key", "clients.availability", availability={"chance": 0.5}),
    # Models and compressors.
    started("weights a FIFO", os.mkfifo),
    started("weights a device", lambda path: path.symlink_to("/dev/zero")),
    started("weights a link to nothing", link_to_nothing),
    started("weights a folder", Path.mkdir),
    started("no weights", b""),
    started("weights that are text", b"none" * 100),
    started("weights with a header of 2^60 bytes", (2**60).to_bytes(8, "little") + b"{}"),
    started("weights in deep JSON", (10**5).to_bytes(8, "little") + b"[" * 10**5),
    mistake("weights nowhere", "model.start", model={"name": "mlp", "start": "nowhere.safetensors"}),
    mistake("weights without a name", "model.start", model={"name": "mlp", "start": ""}),
    mistake("weights of another kind", "model.start", model={"name": "mlp", "start": [1]}),
    mistake("hidden of 1e13", "model.hidden", model={"name": "mlp", "hidden": [10**13]}),
    mistake("hidden of 10^30", "model.hidden", model={"name": "mlp", "hidden": [10**30]}),
    mistake("hidden zero", "model.hidden", model={"name": "mlp", "hidden": [0]}),
    mistake("a text model on images", "char-lstm", model="char-lstm"),
    uplink("keep_ratio above one", "uplink.keep_ratio", name="topk", keep_ratio=2.0),
    uplink("feedback around feedback", "uplink", name="feedback", inner={"name": "feedback"}),
    uplink("levels of 10^12", "uplink.levels", name="qsgd", levels=10**12),
    mistake("a memory for all and a reply to each", "downlink", downlink="feedback", method={"name": "l2gd"}),
    uplink("an inner that is no quantizer", "topk", name="compose", inner="topk"),
    # What runs it.
    mistake("cuda without num_gpus", "device", runtime={**RAY, "device": "cuda"}, in_suite=True),
    mistake("cuda inline", "device", runtime={"executor": "inline", "device": "cuda"}),
    mistake("a billion actors", "runtime.actors", runtime={**RAY, "actors": 10**9}, in_suite=True),
    mistake("actors of 10^30", "runtime.actors", runtime={**RAY, "actors": 10**30}),
    mistake("a million GPUs an actor", "runtime.num_gpus", runtime={**RAY, "num_gpus": 1e6}),
    mistake("a share and a half of a GPU", "num_gpus", runtime={**RAY, "num_gpus": 1.5}),
    *[
        mistake(f"an address {word}", "address", runtime={**RAY, "address": address})
        for word, address in (
            ("without a port", "nowhere"),
            ("with port 99999", "127.0.0.1:99999"),
            ("with a port of 5,000 digits", "127.0.0.1:" + "9" * 5000),
            ("of no letters", "\u2603:6379"),
            ("of a Ray client", "ray://127.0.0.1:10001"),
        )
    ],
    Case(
        "experiment",
        "an address where nobody answers",
        ["run", "bad.toml"],
        ["127.0.0.1:1", "RAY_ADDRESS"],
        {"bad.toml": experiment(runtime={**RAY, "address": "127.0.0.1:1"})},
        code=FAILED,
    ),
    mistake("actors zero", "runtime.actors", runtime={**RAY, "actors": 0}),
    mistake("threads of 10^9", "runtime.threads", runtime={"executor": "inline", "threads": 10**9}),
    mistake("threads of 10^30", "runtime.threads", runtime={"executor": "inline", "threads": 10**30}),
    mistake("an unknown executor", "runtime.executor", runtime={"executor": "spark"}),
    mistake("a store of 1 MB", "runtime.object_store_memory_mb", runtime={**RAY, "object_store_memory_mb": 1}),
    mistake("checkpoints every -1 rounds", "checkpoint.every", checkpoint={"every": -1}),
    mistake("a heldout share of one", "splits.heldout_ratio", splits={"heldout_ratio": 1.0}),
    mistake("an output folder with a null byte", "output.directory", output={"directory": "a\0b"}),
]  # fmt: skip
