"""`rayfl report`: its options, its page, and what a run's description says to it."""

from typing import Any

from tests.hostile.case import Case, Content
from tests.hostile.kinds.damage import (
    DEEP_JSON,
    GARBAGE,
    column,
    edited,
    endless,
    fifo,
    folder,
    link_to_nothing,
    no_folder,
)


def report(
    name: str, *command: object, names: tuple[str, ...] = (), in_suite: bool = False, in_process: bool = False
) -> Case:
    """`rayfl report` of a finished run with these arguments."""
    return Case("report", name, ["report", *command], names, start="done", in_suite=in_suite, in_process=in_process)


def over(name: str, path: str, content: Content = "mine", in_suite: bool = False) -> Case:
    """A page over a file that rayfl did not write as a page."""
    files = {path: content} if "/" not in path else {}
    return Case("report", name, ["report", "run", "--output", path], [path], files, start="done", in_suite=in_suite)


# Any: settings of the experiment.
def described(name: str, /, in_suite: bool = False, **changes: Any) -> Case:
    """A run whose experiment says something else."""
    return Case(
        "report",
        name,
        ["report", "run"],
        [next(iter(changes)).rpartition("__")[2]],
        {"run/experiment.json": edited(**changes)},
        start="done",
        in_suite=in_suite,
    )


def damaged(name: str, path: str, content: Content, in_suite: bool = False) -> Case:
    return Case("report", name, ["report", "run"], [path], {f"run/{path}": content}, start="done", in_suite=in_suite)


CASES = [
    Case("report", "valid", ["report", "run", "--json"], start="done", code=0),
    Case("report", "valid: a sweep", ["report", "run", "--json"], start="sweep", code=0),
    Case("report", "valid: a page", ["report", "run"], start="done", code=0, may_write=["run/report.html"]),
    Case(
        "report",
        "valid: a page over its own",
        ["report", "run"],
        files={"run/report.html": "<!DOCTYPE html><title>demo - rayfl report</title>"},
        start="done",
        code=0,
        may_write=["run/report.html"],
    ),
    # Directories.
    report("nothing", "absent", names=("absent",), in_process=True),
    report("a file", "demo.toml", names=("demo.toml",)),
    report("a run and nothing", "run", "absent", names=("absent",)),
    report("a name of 300 letters", "x" * 300, names=("xxx",)),
    Case("report", "an empty folder", ["report", "empty"], ["empty"], {"empty": folder}),
    Case("report", "a folder of folders", ["report", "empty"], ["empty"], {"empty/a": folder, "empty/b": folder}),
    # Options.
    report("--target 0", "run", "--target", 0, names=("target",)),
    report("--target 2", "run", "--target", 2, names=("target",)),
    report("--target nan", "run", "--target", "nan", names=("target",)),
    report("--target inf", "run", "--target", "inf", names=("target",)),
    report("--last 0", "run", "--last", 0, names=("last",)),
    report("--last -1", "run", "--last", -1, names=("last",)),
    report("--metric unknown", "run", "--metric", "own/acuracy", names=("own/acuracy",)),
    report("--metric empty", "run", "--metric", "", names=("accuracy",)),
    report("--best-over unknown", "run", "--best-over", "method.lrr", names=("method.lrr",)),
    report("--best-over empty", "run", "--best-over", "", names=("best",)),
    # Pages over what is there.
    over("over a stranger's file", "mine.html"),
    over("over a stranger's text", "mine.txt"),
    over("over the experiment", "run/experiment.json", in_suite=True),
    over("over a table", "run/records/rounds.parquet"),
    over("over a platform", "run/platform.json"),
    over("over a lock", "run/lock"),
    over("over a folder", "folder", folder),
    over("over a FIFO", "pipe", fifo),
    over("below a file", "demo.toml/x.html"),
    report("a page of 300 letters", "run", "--output", "x" * 300, names=("xxx",)),
    report("a page with an empty name", "run", "--output", ""),
    report("a page into a run", "run", "--output", "run/mine.html", names=("run/mine.html",)),
    Case(
        "report",
        "a page through a link to a stranger's file",
        ["report", "run", "--output", "link.html"],
        ["link.html"],
        {"mine.txt": "mine", "link.html": lambda path: path.symlink_to("mine.txt")},
        start="done",
    ),
    Case(
        "report",
        "a stranger's report.html",
        ["report", "run"],
        ["report.html"],
        {"run/report.html": folder},
        start="done",
    ),
    # Descriptions.
    damaged("experiment.json deep", "experiment.json", DEEP_JSON, in_suite=True),
    damaged("experiment.json a device", "experiment.json", endless),
    damaged("experiment.json a link to nothing", "experiment.json", link_to_nothing),
    damaged("platform.json a FIFO", "platform.json", fifo),
    damaged("platform.json a list", "platform.json", "[]"),
    damaged("records a file", "records", no_folder),
    damaged("seconds infinite", "records/rounds.parquet", column("wall_s", float("inf")), in_suite=True),
    damaged("null names of metrics", "records/metrics.parquet", column("name", None), in_suite=True),
    damaged("null rounds", "records/rounds.parquet", column("round", None)),
    damaged("garbage for metrics", "records/metrics.parquet", GARBAGE),
    described("a target of text", report__target="high"),
    described("a last of a fraction", report__last=1.5),
    described("a best_over that is a number", report__best_over=5),
    described("tables of text", report__tables="high"),
]  # fmt: skip
