"""A plug-in that reads a file beside itself: it is kept with the run, or refused before it."""

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.single import run
from rayfl.choices import beside, plugins
from rayfl.choices.kinds import find
from rayfl.experiment.experiment import read
from rayfl.methods.base import Method
from rayfl.run_directory.run_files import own_files, require_own_entries
from tests.actors.toys import assert_same_run
from tests.jobs.commands import rayfl
from tests.loaded_process import LoadedProcess, loaded_process
from tests.refusals import mentions, refused

METHOD = """
import json
import os
from pathlib import Path

import numpy as np

from rayfl.methods.server.fedavg import FedAvg

HERE = Path(__file__).parent
{top}

class Scaled(FedAvg):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.factor = {made}

    def begin(self, state, received, ctx):
        carry = super().begin(state, received, ctx)
        scale = self.factor * {lazy}
        return {{**carry, "params": {{name: scale * value for name, value in carry["params"].items()}}}}
"""
EXPERIMENT = """
rounds = 3
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 3}
method = {name = "mine.py:Scaled", lr = 0.1}
checkpoint = {every = 1}
output = {report = false}
runtime = {executor = "inline"}
"""
READS = {
    "at import": {"top": "TABLE = json.loads((HERE / 'table.json').read_text())", "lazy": "TABLE[0]"},
    "by os.path": {"top": "P = os.path.join(os.path.dirname(__file__), 'table.json')", "made": "json.load(open(P))[0]"},
    "at construction": {"made": "json.loads(Path(__file__).with_name('table.json').read_text())[0]"},
    "in a client's work": {"lazy": "json.loads((HERE / 'table.json').read_text())[0]"},
    "in a folder": {"lazy": "np.load(HERE / 'deep' / 'data' / 'table.npy')[0]"},
    "in a folder, one text": {"lazy": "np.load(HERE / 'deep/data/table.npy')[0]"},
    "by its ending": {"made": "json.loads(Path(__file__).with_suffix('.json').read_text())[0]"},
    "without Python": {
        "top": "import pyarrow.parquet as pq",
        "lazy": "pq.read_table(str(HERE / 'table.parquet'))['x'][0].as_py()",
    },
    "in a file that it imports": {"top": "import helper", "lazy": "helper.number()"},
}
LIKE = ("by os.path", "at construction", "in a folder", "in a folder, one text", "by its ending")
"""Ways to read that go through the same places as the others."""


def plugin(top: str = "", made: str = "1.0", lazy: str = "1.0") -> str:
    return METHOD.format(top=top, made=made, lazy=lazy)


def write_files(folder: Path, number: float = 0.5) -> None:
    (folder / "deep" / "data").mkdir(parents=True, exist_ok=True)
    for name in ("table.json", "mine.json", "helper.json", "other.json"):
        (folder / name).write_text(f"[{number}]")
    np.save(folder / "deep/data/table.npy", np.array([number]))
    pq.write_table(pa.table({"x": [number]}), folder / "table.parquet")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plug-in's folder, which is not the current one."""
    folder = tmp_path / "mine"
    folder.mkdir()
    write_files(folder)
    (folder / "helper.py").write_text(
        "import json\nfrom pathlib import Path\n\ndef number():\n"
        "    return json.loads(Path(__file__).with_suffix('.json').read_text())[0]\n"
    )
    (folder / "own.toml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    beside._homes.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def _forget():
    yield
    beside._homes.cache_clear()


@pytest.fixture(scope="module")
def process() -> Iterator[LoadedProcess]:
    with loaded_process() as process:
        yield process


def played(*words: object) -> None:
    result = rayfl(*words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "reads", [pytest.param(READS[name], marks=[pytest.mark.slow] * (name in LIKE)) for name in READS], ids=READS
)
def test_a_run_keeps_what_its_plug_in_reads_and_is_resumed_without_the_original(
    home: Path, reads: dict[str, str], process: LoadedProcess
):
    (home / "mine.py").write_text(plugin(**reads))
    played("run", "mine/own.toml", "--output", "long")
    played("run", "mine/own.toml", "--rounds", 2, "--output", "short")
    require_own_entries(Path("short"))
    assert sum(name.startswith("files/plugin-") for name in own_files(Path("short"))) >= 2
    kept = sorted(own_files(Path("short")))
    # Other content is another experiment, from which this run does not go on.
    write_files(home, number=0.25)
    changed = ["method.name", "files/plugin-"]
    refused(rayfl("resume", "short", "--rounds", 3, "method.name=mine/mine.py:Scaled"), names=changed)
    shutil.rmtree(home)
    shutil.rmtree("user", ignore_errors=True)
    shutil.move("short", "moved")
    # In a process that has not run the plug-in.
    done = process.rayfl("resume", "moved", "--rounds", 3, folder=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert [name for name in sorted(own_files(Path("moved"))) if "files/" in name] == [
        name for name in kept if "files/" in name
    ]
    assert_same_run(Path("long"), Path("moved"))


def test_a_copy_whose_file_is_damaged_or_gone_is_refused(home: Path):
    # A process runs a source once, and another test's folder for this one may be gone.
    (home / "mine.py").write_text(plugin(**READS["in a client's work"]) + "# damaged\n")
    played("run", "mine/own.toml", "--rounds", 2, "--output", "short")
    (copy,) = Path("short/files").glob("plugin-*/table.json")
    copy.write_text("[0.25]")
    refused(rayfl("resume", "short", "--rounds", 3), names=["method.name", "reads"])
    copy.unlink()
    refused(rayfl("resume", "short", "--rounds", 3), names=["method.name", "reads"])
    copy.write_text("[0.5]")
    played("resume", "short", "--rounds", 3)


def test_files_that_vanish_from_the_cache_are_there_again(home: Path):
    (home / "mine.py").write_text(plugin(**READS["in a client's work"]) + "# vanished\n")
    played("run", "mine/own.toml", "--rounds", 2, "--output", "short")
    shutil.rmtree("user")
    played("run", "mine/own.toml", "--rounds", 2, "--output", "again")


def test_another_process_gets_the_files_with_the_source(home: Path):
    (home / "mine.py").write_text(plugin(top="TABLE = json.loads((HERE / 'table.json').read_text())"))
    found = find(Method, f"{home}/mine.py:Scaled")
    sent = home.parent / "sent"
    sent.write_bytes(pickle.dumps({"files": plugins.loaded_files(), "method": found}))
    shutil.rmtree(home)
    shutil.rmtree("user", ignore_errors=True)
    program = f"import pickle, sys; found = pickle.load(open({str(sent)!r}, 'rb'))['method']; "
    program += "print(sys.modules[found.__module__].TABLE)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[0.5]\n", done.stderr


@pytest.mark.ray
def test_actors_read_the_files_at_the_first_call(home: Path, cluster):
    (home / "mine.py").write_text(plugin(**READS["in a client's work"]))
    alone = run(read(home / "own.toml"), Path("alone"))
    shared = run(read(home / "own.toml", ["runtime.executor=ray", "runtime.actors=2"]), Path("shared"))
    assert_same_run(alone, shared)


REFUSED = {
    "a name that is made": (
        {"lazy": "json.loads((HERE / f'tab{chr(108)}e.json').read_text())[0]"},
        ["reads", "table.json"],
    ),
    "at import": ({"top": "X = open(HERE / ('oth' + 'er.json')).read()"}, ["mine.py:11", "reads", "other.json"]),
    "at construction": ({"made": "len(open(HERE / ('oth' + 'er.json')).read())"}, ["reads", "other.json"]),
    "a list": ({"top": "X = sorted(HERE.glob('*.json'))"}, ["mine.py:11", "lists"]),
    "a list by os": ({"made": "len(os.listdir(HERE))"}, ["lists"]),
    "writing": ({"top": "(HERE / 'log.txt').write_text('mine')"}, ["mine.py:11", "writes", "log.txt"]),
    "another folder": ({"top": "X = open(HERE.parent / 'outside.json').read()"}, ["mine.py:11", "outside.json"]),
}


@pytest.mark.parametrize(("reads", "facts"), REFUSED.values(), ids=REFUSED)
def test_what_a_resumed_run_could_not_read_is_refused_when_it_is_read(
    home: Path, reads: dict[str, str], facts: list[str]
):
    (home.parent / "outside.json").write_text("[1.0]")
    (home / "mine.py").write_text(plugin(**reads))
    result = rayfl("run", "mine/own.toml")
    assert result.exit_code in (1, 2), result.output
    assert not [fact for fact in facts if not mentions(result.stderr, fact)], result.stderr
    assert not (home / "log.txt").exists()
    # Before the run, unless only a client's work reads it.
    assert Path("runs").exists() == ("lazy" in reads)


def test_a_file_that_is_too_large_to_be_kept_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beside, "MOST_BYTES", 3)
    (home / "mine.py").write_text(plugin(**READS["at import"]))
    refused(rayfl("run", "mine/own.toml"), names=["mine.py:11", "table.json", "3 bytes"])


def test_a_file_in_the_current_folder_is_read_beside_the_plug_in_or_not_at_all(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(home)
    for reads in ({"top": "X = open('table.json').read()"}, {"made": "json.load(open('table.json'))[0]"}):
        Path("mine.py").write_text(plugin(**reads).replace("Path(__file__).parent", "None"))
        result = rayfl("run", "own.toml")
        assert result.exit_code in (1, 2), result.output
        assert mentions(result.stderr, "table.json") and mentions(result.stderr, "Path(__file__)"), result.stderr
    assert not Path("runs").exists()


def test_what_settings_name_may_be_read_anywhere(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(home)
    source = plugin(made="json.load(open(self.hyper.where))[0]").replace(
        "    def __init__", "    class Hyper(FedAvg.Hyper):\n        where: str\n\n    def __init__"
    )
    Path("mine.py").write_text(source)
    for number, where in enumerate(("table.json", str(home / "table.json"))):
        played("run", "own.toml", f"method.where={where}", "--output", f"run-{number}")


def test_a_plug_in_that_finds_no_file_is_as_it_was(home: Path):
    (home / "mine.py").write_text(plugin().replace("Path(__file__).parent", "'table.json'"))
    played("run", "mine/own.toml", "--output", "run")
    assert [path.name for path in Path("run/files").glob("*/*")] == ["mine.py"]
    assert not Path("user/.cache/rayfl").exists()


def test_an_optional_file_may_be_missing(home: Path):
    lazy = "0.5 if not (HERE / 'none.json').exists() else 1.0"
    top = "try:\n    X = open(HERE / 'none.json')\nexcept FileNotFoundError:\n    X = None"
    (home / "mine.py").write_text(plugin(top=top, lazy=f"({lazy})"))
    played("run", "mine/own.toml", "--output", "run")


def test_links_in_a_circle_end(home: Path):
    (home / "deep" / "up").symlink_to("..")
    (home / "deep" / "data" / "deep").symlink_to("../../deep")
    (home / "mine.py").write_text(plugin(top="NAMES = ['deep', 'up', 'data']", **READS["in a folder"]))
    played("run", "mine/own.toml", "--output", "run")


def test_where_no_cache_can_be_written_the_files_lie_in_a_temporary_folder(home: Path, monkeypatch: pytest.MonkeyPatch):
    (home.parent / "user").write_text("no folder")
    (home / "mine.py").write_text(plugin(**READS["at import"]))
    played("run", "mine/own.toml", "--output", "run")
