"""What stands behind the file on the command line: key=value, and options."""

from pathlib import Path

from tests.hostile.case import Case


def override(word: str, *names: str, in_suite: bool = False, in_process: bool = False) -> Case:
    """`rayfl run demo.toml WORD`, refused in a sentence with `names`; else with the word's key."""
    name = word if len(word) < 60 else f"{word[:50]}... of {len(word)}"
    return Case(
        "overrides",
        name.replace("\0", "NUL").replace("\n", "LF"),
        ["run", "demo.toml", word],
        names or [word.partition("=")[0]],
        in_suite=in_suite,
        in_process=in_process,
    )


def options(*command: object, names: tuple[str, ...] = (), in_suite: bool = False) -> Case:
    return Case("overrides", " ".join(str(word) for word in command)[:70], command, names, in_suite=in_suite)


CASES = [
    Case("overrides", "valid", ["run", "demo.toml", "method.lr=0.2", "--output", "run"], code=0, may_write=["run"]),
    Case(
        "overrides", "a bare word", ["run", "demo.toml", "uplink=natural", "--output", "run"], code=0, may_write=["run"]
    ),
    # No overrides at all.
    override("method.lr", "method.lr"),
    override("=5", "=5"),
    override(".=5", ".=5"),
    override("method..lr=5", "method..lr=5"),
    override("method.=5", "method.=5"),
    override("rounds.x=5", "rounds"),
    override("rounds=5\nseed=1", "rounds"),
    override("rounds=\0", "rounds"),
    override("output.directory=a\0b", "output.directory"),
    override(".".join(["a"] * 20_000) + "=1", "a.a"),
    override("method.lr=" + "[" * 20_000 + "]" * 20_000, "nested"),
    override("method.lr=" + "{a=" * 20_000 + "1" + "}" * 20_000, "nested"),
    override("rounds=" + "9" * 10_000, "999"),
    override("rounds=" + "0x" + "f" * 20_000, "rounds"),
    # Values that no setting takes.
    override("method.lr=nan"),
    override("method.lr=inf"),
    override("method.lr=-inf"),
    override("method.lr=1e400"),
    override("method.lr=true"),
    override("method.lr=[0.1]"),
    override("method.lr={a=1}"),
    override("method.lr=2020-01-01"),
    override("rounds=1e3"),
    override("rounds=five"),
    override("rounds=0"),
    override("seed=-1"),
    override("seed=1.5"),
    override("name=", "name"),
    override("name=a/b", "name"),
    override("label=5", "label"),
    override("clients=5", "clients"),
    override("clients.count=1e9"),
    override("clients.count=1000000000", "clients.count", in_process=True),
    override("clients.per_round=5"),
    override("clients.fraction=0"),
    override("clients.work=fast"),
    override("clients.availability=always"),
    override("clients.uplink_mbps={median=1}"),
    override("clients.uplink_mbps={low=5,high=1}"),
    override("clients.retention_ratio=[0.5,1.5]"),
    override("data=5", "data"),
    override("data.dim=5", "data.dim"),
    override("partition.ratio=1", "partition.ratio"),
    override("partition=lambda-ratio", "partition.ratio"),
    override('partition={name="pathological",classes_per_client=99}', "pathological"),
    override('partition={name="dirichlet-client",alpha=0}', "partition.alpha"),
    override("partition=natural", "natural"),
    override('model={name="mlp",hidden=[10000000000000]}', "model.hidden", in_suite=True),
    override("model.hidden=[3]", "model.hidden"),
    override("method=fedavgg", "fedavgg"),
    override("method.keep_ratio=0.1", "method.keep_ratio"),
    override("method.batch_size=-1"),
    override("uplink=topkk", "topkk"),
    override("uplink.keep_ratio=0.5", "uplink"),
    override('uplink={name="threshold",threshold=-1}', "uplink.threshold"),
    override('uplink={name="quantize",levels=0}', "uplink.levels"),
    override('uplink={name="quantize",bucket=-1}', "uplink.bucket"),
    override("topology=ring", "topology"),
    override("evaluation.every=-1"),
    override("runtime.actors=0"),
    override("runtime.stack_width=0"),
    override("runtime.device=tpu"),
    override("runtime.call_timeout_s=0"),
    override("runtime.limit_s=-5"),
    override("report.target=2"),
    override("report.last=0"),
    override("sweep=5", "sweep"),
    options("run", "demo.toml", "--rounds", 0, names=("rounds",)),
    options("run", "demo.toml", "--rounds", 10**25, names=("rounds",)),
    options("run", "demo.toml", "--actors", 0, names=("runtime.actors",)),
    options("run", "demo.toml", "--output", "demo.toml", names=("demo.toml",)),
    options("run", "demo.toml", "--output", ".", names=("demo.toml",)),
    options("run", "demo.toml", "--output", ".", "--overwrite", names=("demo.toml",)),
    options("run", "demo.toml", "--output", "x" * 300, names=("xxx",)),
    options("run", "demo.toml", "--output", "", names=()),
    options("run", "demo.toml", "--output", "demo.toml/x", names=("demo.toml",)),
    options("run", "demo.toml", "runtime.executor=ray", "runtime.actors=1000000000", names=("runtime.actors",)),
    options("run", "demo.toml", "runtime.executor=ray", "--actors", 10**9, names=("runtime.actors",)),
    options("run", "demo.toml", "runtime.executor=ray", "runtime.device=cuda", names=("runtime.num_gpus",)),
    options("methods", "fedavgg", names=("fedavgg",)),
    options("methods", "absent.py:Mine", names=("absent.py",)),
    Case(
        "overrides",
        "--overwrite a run with a stranger's file",
        ["run", "demo.toml", "--output", "run", "--overwrite"],
        ["mine.txt"],
        {"run/mine.txt": "mine"},
        start="done",
    ),
    Case(
        "overrides",
        "--overwrite a run with a stranger's file among its models",
        ["run", "demo.toml", "--output", "run", "--overwrite"],
        ["mine.txt"],
        {"run/models/mine.txt": "mine"},
        start="done",
        in_suite=True,
    ),
    Case(
        "overrides",
        "--output through a link to nothing",
        ["run", "demo.toml", "--output", "link"],
        ["link"],
        {"link": lambda path: Path(path).symlink_to("nowhere/at/all")},
    ),
]
