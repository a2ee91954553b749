"""`rayfl resume`: directories that are no run, descriptions that are damaged, changes that a run does not take."""

from typing import Any

from tests.hostile.case import FAILED, Case, Content
from tests.hostile.kinds.damage import (
    DEEP_JSON,
    DEEP_TABLES,
    GARBAGE,
    edited,
    endless,
    fifo,
    folder,
    gone,
    half,
    link_to_itself,
    no_folder,
)

WHOLE = ["run"]


def cut(name: str, path: str, content: Content, *names: str, in_suite: bool = False, in_process: bool = False) -> Case:
    """A cut run with one file changed, which is named."""
    return Case(
        "resume",
        name,
        ["resume", "run"],
        names or [path],
        {f"run/{path}": content},
        start="cut",
        in_suite=in_suite,
        in_process=in_process,
    )


def change(word: str, *names: str, in_suite: bool = False, in_process: bool = False) -> Case:
    """A setting that a resumed run does not take."""
    return Case(
        "resume",
        word if len(word) < 60 else f"{word[:50]}... of {len(word)}",
        ["resume", "run", word],
        names or [word.partition("=")[0]],
        start="cut",
        in_suite=in_suite,
        in_process=in_process,
    )


# Any: settings of the experiment.
def described(name: str, /, *names: str, in_suite: bool = False, **changes: Any) -> Case:
    """A cut run whose experiment.json says something else."""
    return cut(name, "experiment.json", edited(**changes), *(names or ["rounds"]), in_suite=in_suite)


CASES = [
    Case("resume", "valid", ["resume", "run"], start="cut", code=0, may_write=WHOLE, same_bits=True),
    Case("resume", "valid: more rounds", ["resume", "run", "--rounds", 7], start="done", code=0, may_write=WHOLE),
    Case("resume", "nothing", ["resume", "absent"], ["absent"], in_process=True),
    Case("resume", "a file", ["resume", "demo.toml"], ["demo.toml"]),
    Case("resume", "an empty folder", ["resume", "empty"], ["empty"], {"empty": folder}),
    Case("resume", "a sweep", ["resume", "run"], ["run"], start="sweep"),
    Case("resume", "an empty name", ["resume", ""], []),
    Case("resume", "a name of 300 letters", ["resume", "x" * 300], ["xxx"]),
    Case("resume", "finished", ["resume", "run"], ["finished", "--rounds"], start="done"),
    Case("resume", "fewer rounds", ["resume", "run", "--rounds", 3], ["rounds=3"], start="done"),
    Case("resume", "no rounds", ["resume", "run", "--rounds", 0], ["rounds"], start="done"),
    Case("resume", "10^25 rounds", ["resume", "run", "--rounds", 10**25], ["rounds"], start="cut"),
    Case("resume", "no actors", ["resume", "run", "--actors", 0], ["runtime.actors"], start="cut"),
    # Settings.
    change("seed=2"),
    change("method.lr=0.5"),
    change("method=fedavg", "method"),
    change("clients.count=5"),
    change("data=synthetic", "data"),
    change("model=mlp", "model"),
    change("uplink=topk", "uplink"),
    change("partition=natural", "partition"),
    change("runtime.engine=vmap"),
    change("runtime.threads=2", "threads"),
    change("runtime.device=cuda", "device"),
    change("evaluation.every=3"),
    change("sweep.seed=[1]", "rayfl sweep"),
    change("sweep={seed=[1]}", "rayfl sweep"),
    change("ronds=5", "ronds"),
    change("method", "method"),
    change("method.lr=" + "[" * 20_000 + "]" * 20_000, "nested"),
    # Files that say what the run is.
    *[
        cut(f"{name} {word}", name, content)
        for name in ("experiment.json", "platform.json")
        for word, content in (("garbage", GARBAGE), ("half", half), ("gone", gone), ("a folder", folder))
        # Half of a platform may be a whole table.
        if (name, word) != ("platform.json", "half")
    ],
    cut("experiment.json a list", "experiment.json", "[]"),
    cut("experiment.json null", "experiment.json", "null"),
    cut("experiment.json deep lists", "experiment.json", DEEP_JSON),
    cut("experiment.json deep tables", "experiment.json", DEEP_TABLES, in_suite=True),
    cut("experiment.json a number of 10,000 digits", "experiment.json", '{"rounds": ' + "9" * 10_000 + "}"),
    cut("experiment.json a FIFO", "experiment.json", fifo, "experiment.json"),
    cut("experiment.json a device", "experiment.json", endless),
    cut("experiment.json a link to itself", "experiment.json", link_to_itself),
    cut("platform.json deep", "platform.json", DEEP_JSON),
    cut("platform.json a FIFO", "platform.json", fifo),
    cut("platform.json empty table", "platform.json", "{}", "torch=None"),
    described("a description without rounds", rounds=None),
    described("rounds text", rounds="many"),
    described("rounds a list", rounds=[1]),
    described("a description without a method", "method", method=None),
    described("a method that is a number", "method", method=5),
    described("another seed", "seed", seed=7),
    described("clients text", "clients", clients="four"),
    # A disk in the way, and strangers' directories.
    Case(
        "resume",
        "records a file",
        ["resume", "run"],
        ["records"],
        {"run/records": no_folder},
        start="cut",
    ),
    Case(
        "resume",
        "lock a folder",
        ["resume", "run"],
        ["lock"],
        {"run/lock": folder},
        start="cut",
        code=FAILED,
    ),
]
