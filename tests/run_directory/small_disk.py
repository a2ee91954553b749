"""Runs on a file system of 4 MB that others fill: `python -m tests.run_directory.small_disk DIRECTORY`
prints what came of them.

DIRECTORY is where a file system of that size is mounted. A line for every run: how many bytes it had, the exit code,
what it said, and whether the run that was resumed once there was room again is the undisturbed one.
"""

from rayfl.determinism.process import prepare_process

prepare_process()

import json  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

from click.testing import CliRunner  # noqa: E402

from jobs.cli import main  # noqa: E402
from jobs.single import run  # noqa: E402
from rayfl import toml  # noqa: E402
from rayfl.run_directory.record import read_run  # noqa: E402
from tests.actors.toys import assert_same_run, experiment  # noqa: E402

PAGE = 4096
SIZE = 4 << 20


def attempt(disk: Path, file: Path, free: int, undisturbed: Path) -> dict[str, object]:
    """One run with so many bytes, and another go with all of them."""
    for left in disk.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    filler, directory = disk / "filler", disk / "run"
    filler.write_bytes(bytes(SIZE - free))
    result = CliRunner().invoke(main, ["run", str(file), "--output", str(directory)])
    partials = [path.name for path in disk.rglob("*.partial")]
    about = {
        "free": free,
        "code": result.exit_code,
        "said": result.stderr,
        "notices": [line for line in result.stdout.splitlines() if "checkpoint" in line],
    }
    filler.unlink()
    if not directory.exists():
        return {**about, "partials": partials, "same": None}
    again = None
    if result.exit_code:
        again = CliRunner().invoke(main, ["resume", str(directory)])
        assert again.exit_code == 0, (free, result.output, again.output, again.exception)
    assert read_run(directory).finished
    assert_same_run(undisturbed, directory)
    return {**about, "partials": partials, "same": True}


def every_size(disk: Path) -> None:
    """Runs with more and more room, until one has enough."""
    settings = {"runtime": {"executor": "inline"}, "output": {"report": False}, "checkpoint": {"every": 2}}
    with tempfile.TemporaryDirectory() as scratch:
        chosen = experiment("fedpse", rounds=6, **settings)
        undisturbed = run(chosen, Path(scratch) / "run")
        file = Path(scratch) / "experiment.toml"
        file.write_text(toml.dumps(chosen.as_dict()), encoding="utf-8")
        pages = 0
        while True:
            about = attempt(disk, file, pages * PAGE, undisturbed)
            print(json.dumps(about), flush=True)
            if about["code"] == 0 and not about["notices"]:
                return
            pages += 1 + pages // 2


if __name__ == "__main__":
    every_size(Path(sys.argv[1]))
