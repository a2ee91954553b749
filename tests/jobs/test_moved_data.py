"""A run goes on where its data lie in another folder, and its records name no folder of its owner."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rayfl.data import file_digest
from rayfl.report.groups import group_runs
from rayfl.run_directory.record import Recorder, read_run
from tests.actors.toys import assert_same_run, logged
from tests.data.files import numbered, write_image
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, refused

EXPERIMENT = """
rounds = 3
data = {data}
partition = "{partition}"
clients = {{count = 2}}
model = "{model}"
method = {{name = "fedavg", lr = 0.1, batch_size = 4}}
checkpoint = {{every = 1}}
"""


def write_table(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = [f"{i % 7},{i % 3},{label}" for i, label in enumerate(generator.integers(0, 2, 40))]
    path.write_text("\n".join(["age,ward,label", *rows]))


def tables(folder: Path) -> None:
    write_table(folder / "train.csv", 0)
    write_table(folder / "later.csv", 1)


def texts(folder: Path) -> None:
    (folder / "letters").mkdir()
    for name in ("ada", "bob"):
        (folder / "letters" / f"{name}.txt").write_text(f"{name} writes " * 40)


def images(folder: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(8):
            write_image(folder / "photos" / name / f"{number}.png", numbered(len(name) + number, 4, (4, 3)))


def arrays(folder: Path) -> None:
    (folder / "saved").mkdir()
    np.save(folder / "saved" / "inputs.npy", np.random.default_rng(0).normal(size=(40, 3)))
    np.save(folder / "saved" / "labels.npy", np.arange(40) % 2)


def digits(folder: Path) -> None:
    """The four files of MNIST, of 8 images each."""
    (folder / "mnist").mkdir()
    for half in ("train", "t10k"):
        for part, values in (
            ("images-idx3", np.arange(8 * 28 * 28, dtype=np.uint8).reshape(8, 28, 28)),
            ("labels-idx1", np.arange(8, dtype=np.uint8)),
        ):
            head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / "mnist" / f"{half}-{part}-ubyte").write_bytes(head + values.tobytes())


KINDS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "table": (tables, '{name = "table", path = "train.csv", test_path = "later.csv"}', "iid"),
    "text": (texts, '{name = "text", path = "letters", length = 8}', "natural"),
    "images": (images, '{name = "image-folder", path = "photos"}', "iid"),
    "arrays": (arrays, '{name = "arrays", path = "saved"}', "iid"),
    "root": (digits, '{name = "mnist", root = "{folder}/mnist"}', "iid"),
}


def project(folder: Path, kind: str) -> Path:
    """A project's folder with an experiment and its data."""
    write, data, partition = KINDS[kind]
    folder.mkdir(parents=True)
    write(folder)
    model = '"char-lstm", predicts = "all", hidden = 4, embedding = 4' if kind == "text" else '"logistic"'
    text = EXPERIMENT.format(data=data.replace("{folder}", str(folder)), partition=partition, model="MODEL")
    (folder / "own.toml").write_text(text.replace('"MODEL"', f"{{name = {model}}}"))
    return folder


def played(*words: object) -> None:
    result = rayfl(*words)
    assert result.exit_code == 0, result.output


class Killed(BaseException):
    """Stands for a kill: no `except Exception` sees it."""


def recorded_data(directory: Path) -> dict[str, str]:
    """The `[data]` table of a run's record."""
    data = read_run(directory).experiment["data"]
    assert isinstance(data, dict)
    return data


def killed_after_two_rounds(*words: object) -> None:
    record = Recorder.round

    def killing(self: Recorder, row, clients, metrics):
        if row.round == 2:
            raise Killed
        record(self, row, clients, metrics)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Recorder, "round", killing)
        rayfl(*words)


@pytest.fixture
def ada(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project of the table, which is the current folder."""
    folder = project(tmp_path / "ada" / "project", "table")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_repeated_command_goes_on_where_the_project_lies_elsewhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "rayfl")
    home, output = project(tmp_path / "first", kind), tmp_path / "shared" / "run"
    monkeypatch.chdir(home)
    played("run", "own.toml", "--inline", "--output", tmp_path / "long")
    killed_after_two_rounds("run", "own.toml", "--inline", "--output", output)
    # A new head unpacks the working directory into another folder.
    other = project(tmp_path / "new" / "head", kind)
    monkeypatch.chdir(other)
    shutil.rmtree(home)
    played("run", "own.toml", "--inline", "--output", output, "--resume")
    (sentence,) = [one for one in logged(caplog) if "going on" in one]
    check_sentence(sentence, ["checkpoint", "round 2"])
    assert_same_run(tmp_path / "long", output)


def test_files_that_were_exchanged_renamed_or_changed_are_refused(ada: Path, tmp_path: Path):
    played("run", "own.toml", "--inline", "--rounds", 2, "--output", "run")
    again = ["run", "own.toml", "--inline", "--output", "run", "--resume"]
    refused(rayfl(*again, "data.path=later.csv", "data.test_path=train.csv"), names=["data.path", "later.csv"])
    shutil.copy("train.csv", "same.csv")
    refused(rayfl(*again, "data.path=same.csv"), names=["same.csv"])
    refused(rayfl(*again, "data.path=later.csv"), names=["data.path", "later.csv"])
    shutil.move("train.csv", "kept.csv")
    shutil.move("later.csv", "train.csv")
    shutil.move("kept.csv", "later.csv")
    refused(rayfl(*again), names=["data.digest", "train.csv"])


def test_files_of_clients_that_were_exchanged_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(project(tmp_path / "first", "text"))
    played("run", "own.toml", "--inline", "--rounds", 2, "--output", tmp_path / "run")
    monkeypatch.chdir(project(tmp_path / "second", "text"))
    one, other = Path("letters/ada.txt"), Path("letters/bob.txt")
    texts = one.read_text(), other.read_text()
    other.write_text(texts[0])
    one.write_text(texts[1])
    result = rayfl("run", "own.toml", "--inline", "--output", tmp_path / "run", "--resume")
    refused(result, names=["data.digest", "ada.txt", "bob.txt"])


def test_folders_with_the_files_of_a_root_are_one_and_a_root_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = project(tmp_path / "first", "root")
    monkeypatch.chdir(home)
    killed_after_two_rounds("run", "own.toml", "--inline", "--output", "run")
    shutil.copytree("mnist", tmp_path / "other")
    again = ["run", "own.toml", "--inline", "--output", "run", "--resume"]
    played(*again, f"data.root={tmp_path}/other")
    (tmp_path / "other" / "train-labels-idx1-ubyte").write_bytes(
        (tmp_path / "other" / "train-labels-idx1-ubyte").read_bytes()[:-1] + b"\0"
    )
    refused(rayfl(*again, f"data.root={tmp_path}/other"), names=["data.digest", "train-labels-idx1-ubyte"])


def test_a_sample_of_the_content_and_a_source_without_files_keep_their_folder(
    ada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(ada, tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(file_digest, "MOST_BYTES", 10)
        killed_after_two_rounds("run", "own.toml", "--inline", "--output", "run")
        again = ["--inline", "--output", "run", "--resume"]
        result = rayfl("run", tmp_path / "copy" / "own.toml", *again)
        refused(result, names=["data.path", "--output"])
        played("run", "own.toml", *again)
        assert recorded_data(Path("run"))["path"] == str(ada / "train.csv")
    Path("mine.py").write_text(
        "from rayfl.data.sources.table import Table\n\nclass Mine(Table):\n    def files(self):\n        return []\n"
    )
    mine = "data.name=mine.py:Mine"
    killed_after_two_rounds("run", "own.toml", mine, "--inline", "--output", "mine")
    again = ["--inline", "--output", "mine", "--resume"]
    refused(rayfl("run", tmp_path / "copy" / "own.toml", mine, *again), names=["data.path", "--output"])
    played("run", "own.toml", mine, *again)


def test_no_record_names_the_folder_of_its_owner(ada: Path, tmp_path: Path):
    for output in (ada / "runs" / "first", tmp_path / "shared" / "run"):
        played("run", ada / "own.toml", f"data.path={ada}/train.csv", "--inline", "--output", output)
        files = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
        assert {"experiment.json", "experiment.toml", "origin.json", "report.html"} <= {path.name for path in files}
        assert [path for path, content in files.items() if str(ada).encode() in content or b"/ada" in content] == []
        data = recorded_data(output)
        assert (data["path"], data["test_path"]) == ("train.csv", "later.csv")


def test_data_outside_the_current_folder_keep_their_whole_paths(ada: Path, monkeypatch: pytest.MonkeyPatch):
    (ada / "inside").mkdir()
    monkeypatch.chdir(ada / "inside")
    for changes in ([], ["data.path=../train.csv"]):
        played("run", "../own.toml", *changes, "--inline", "--rounds", 1, "--output", "run", "--overwrite")
        data = recorded_data(Path("run"))
        assert all(os.path.isabs(data[name]) and Path(data[name]).exists() for name in ("path", "test_path"))


@pytest.mark.parametrize("where", ["here", "elsewhere", "deeper"])
def test_a_run_is_resumed_and_read_from_any_folder(
    ada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    played("run", "own.toml", "--inline", "--output", tmp_path / "long")
    output = Path("runs", "first").absolute() if where == "elsewhere" else tmp_path / "shared" / "run"
    played("run", "own.toml", "--inline", "--rounds", 2, "--output", output)
    if where == "elsewhere":
        (tmp_path / "else").mkdir()
        monkeypatch.chdir(tmp_path / "else")
    if where == "deeper":
        output = Path(shutil.move(output, Path("archive", "2024", "run").absolute()))
        monkeypatch.chdir(tmp_path)
    for words in (["show", output], ["report", output]):
        played(*words)
    played("resume", output, "--rounds", 3)
    assert_same_run(tmp_path / "long", output)
    # The experiment that it recorded can be run again.
    played("run", output / "experiment.toml", "--inline", "--output", tmp_path / "again")
    assert_same_run(tmp_path / "long", tmp_path / "again")


def test_where_the_data_are_not_found_the_sentence_says_how_to_name_them(
    ada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "shared" / "run"
    played("run", "own.toml", "--inline", "--output", tmp_path / "long")
    played("run", "own.toml", "--inline", "--rounds", 2, "--output", output)
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    refused(rayfl("resume", output, "--rounds", 3), names=["later.csv", "data.path"])
    given = [f"data.path={ada}/train.csv", f"data.test_path={ada}/later.csv"]
    played("resume", output, "--rounds", 3, *given)
    assert_same_run(tmp_path / "long", output)


def test_seeds_on_data_in_two_folders_are_one_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for seed, name in ((1, "first"), (2, "second")):
        monkeypatch.chdir(project(tmp_path / name, "table"))
        played("run", "own.toml", f"seed={seed}", "--inline", "--output", tmp_path / f"run-{seed}")
    found = group_runs([read_run(tmp_path / f"run-{seed}") for seed in (1, 2)])
    assert [len(group.runs) for group in found] == [2]
