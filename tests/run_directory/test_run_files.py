"""The registry of a run's files: all that a run writes is its own, is copied, and makes way for another run."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rayfl.run_directory.object_storage import Storage, below
from rayfl.run_directory.record import read_run
from rayfl.run_directory.run_files import PARTS, is_own_file, own_files, require_own_entries
from tests.jobs.commands import rayfl
from tests.run_directory.test_mirror import server, there

assert server and there

FILE = """
rounds = 2
data = "digits"
partition = "iid"
model = {name = "mlp", hidden = [8], start = "weights.safetensors"}
clients = {count = 4, availability = {trace = "trace.csv"}}
method = {name = "mine.py:Mine", lr = 0.1}
checkpoint = {every = 1}
"""
PLUGIN = "from rayfl.methods.server.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    paper = 'None'\n"
SHAPES = {"1.weight": (8, 64), "1.bias": (8,), "3.weight": (10, 8), "3.bias": (10,)}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment that names weights, a trace and a plugin."""
    monkeypatch.chdir(tmp_path)
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "weights.safetensors")
    Path("trace.csv").write_text("client,first_round,last_round\n0,0,9\n1,0,9\n2,0,9\n")
    Path("mine.py").write_text(PLUGIN)
    Path("run.toml").write_text(FILE)
    return Path("run.toml").absolute()


def played(*arguments: object) -> None:
    result = rayfl(*arguments)
    assert result.exit_code == 0, result.output


def test_all_that_a_run_writes_is_its_own(file: Path):
    played("run", file, "--inline", "--output", "run")
    written = {path.relative_to("run").as_posix() for path in Path("run").rglob("*") if path.is_file()}
    assert set(own_files(Path("run"))) == written - {"lock"}
    kinds = {name.split("/")[1].split("-")[0] for name in written if name.startswith("files/")}
    assert kinds == {"weights", "trace", "plugin"}
    played("run", file, "--inline", "--output", "run", "--overwrite")
    assert read_run(Path("run")).finished


def test_the_copy_of_a_run_with_input_files_is_resumed_elsewhere(file: Path, there: Storage):
    bucket = there.url.replace("/run?", "?")
    played("run", file, "--inline", f"output.directory={bucket}", "output.report=false", "--output", "run")
    for gone in ("run", "weights.safetensors", "trace.csv", "mine.py"):
        (shutil.rmtree if Path(gone).is_dir() else Path.unlink)(Path(gone))
    played("resume", below(bucket, "run"), "--rounds", 3)
    assert len(read_run(Path("runs/run")).rounds) == 3


@pytest.mark.parametrize(
    "name",
    [
        "files/weights.safetensors",
        "files/deep/weights-0123456789ab.safetensors",
        "models/global.safetensors/x",
        "records/rounds.arrows.partial/x",
        "wandb/../experiment.json",
        "lock",
        "experiment.json.partial",
    ],
)
def test_what_no_part_declares_is_not_copied(name: str):
    assert not is_own_file(name)


def test_files_at_any_depth_and_their_folders_are_own(tmp_path: Path):
    deep = tmp_path / "wandb" / "offline-run-20260101_000000-01234567" / "files" / "media" / "table" / "a.json"
    deep.parent.mkdir(parents=True)
    deep.write_text("1 2 3")
    (deep.parents[3] / "tmp" / "code").mkdir(parents=True)
    require_own_entries(tmp_path)
    assert list(own_files(tmp_path)) == [deep.relative_to(tmp_path).as_posix()]


def test_every_part_is_documented():
    assert all(part.patterns and all(part.documented.values()) for part in PARTS)
    names = [name for part in PARTS for name in part.documented]
    assert len(set(names)) == len(names)
