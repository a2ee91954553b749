"""What surrounds a case: its directory with the runs that it begins with, and a look at what a command left there."""

import hashlib
import os
import shutil
from pathlib import Path

from tests.hostile.case import DEMO, Case, experiment
from tests.hostile.child import forked

ROUNDS = 6
RUN = {
    **DEMO,
    "name": "small",
    "rounds": ROUNDS,
    "method": {"name": "fedpse", "lr": 0.1},
    "checkpoint": {"every": 2},
    "runtime": {"executor": "inline"},
}
SWEEP = {**RUN, "sweep": {"seed": [1]}}


def warm_up() -> None:
    """Import all that commands import, so that a forked child need not."""
    import jobs.single
    import jobs.sweep
    from rayfl.choices.kinds import known
    from rayfl.compress.base import Compressor
    from rayfl.data.datasets import Source
    from rayfl.data.partition import PartitionScheme
    from rayfl.data.torchvision import torchvision
    from rayfl.methods.base import Method
    from rayfl.models.base import Architecture
    from rayfl.tasks.base import Task
    from rayfl.topology.graphs import Topology

    for kind in (Compressor, Source, PartitionScheme, Method, Architecture, Task, Topology):
        known(kind)
    torchvision()
    assert jobs.sweep and jobs.single


def make_runs(home: Path) -> None:
    """In `home`: `done`, a finished run; `cut`, the same killed after its fifth round, with checkpoints of 2 and 4
    rounds; `sweep`, the finished run in a sweep's directory."""
    (home / "small.toml").write_text(experiment(**RUN))

    def run() -> None:
        from jobs import console, single
        from rayfl.experiment.experiment import read
        from rayfl.run_directory.play_run import Stopped

        small = read(home / "small.toml")
        single.run(small, home / "done")

        def killed(row: object, *_: object) -> str:
            if getattr(row, "round", None) == ROUNDS - 2:
                raise Stopped
            return ""

        console.line = killed
        single.run(small, home / "cut")

    done = forked(run, home, home / "log")
    assert done.code == 0, done.stderr
    shutil.copytree(home / "done", home / "sweep" / "seed=1")


def prepare(case: Case, directory: Path, runs: Path) -> None:
    """Fill the directory of a case."""
    directory.mkdir(parents=True)
    (directory / "demo.toml").write_text(experiment())
    (directory / "sweep.toml").write_text(experiment(**SWEEP))
    if case.start:
        shutil.copytree(runs / case.start, directory / "run", symlinks=True)
    for name, content in case.files.items():
        path = directory / name
        if callable(content):
            path.parent.mkdir(parents=True, exist_ok=True)
            content(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def listing(directory: Path) -> dict[str, str]:
    """Every path below `directory` with a word for its content."""
    found = {}
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(folder, name)
            found[str(path.relative_to(directory))] = _word(path)
    return found


def _word(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "directory"
    if not path.is_file():
        return "neither file nor directory"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def changed(before: dict[str, str], after: dict[str, str], but: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Paths that are new, and paths that are gone or have another content; those in `but`, or below, do not count."""

    def counts(path: str) -> bool:
        return not any(path == one or path.startswith(f"{one}/") for one in but)

    new = [path for path in after if path not in before and counts(path)]
    replaced = [path for path, word in before.items() if after.get(path) != word and counts(path)]
    return new, replaced
