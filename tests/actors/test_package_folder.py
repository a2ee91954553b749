"""Results of `ray job submit --working-dir .` that would be deleted with the cluster."""

from pathlib import Path

import pytest

from actors.folders import warning_of_deletion
from rayfl.errors import log_once
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence

FILE = """
name = "small"
rounds = 1
data = "digits"
partition = "iid"
model = "logistic"
method = "fedavg"
clients.count = 2
runtime.executor = "inline"
output.report = false
output.track = []
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of a submitted job, as Ray makes it."""
    folder = tmp_path / "session_2026" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "small.toml").write_text(FILE)
    monkeypatch.chdir(folder)
    return folder


def test_a_run_there_says_at_its_beginning_how_to_keep_it(package: Path, caplog: pytest.LogCaptureFixture):
    directory = package / "runs" / "small"
    sentence = warning_of_deletion(directory)
    assert sentence is not None
    check_sentence(sentence, [directory, "--output", "output.directory"])
    for command in (["run", "small.toml"], ["resume", directory, "--rounds", "2"]):
        caplog.clear()
        # Each command has a process of its own.
        log_once.cache_clear()
        result = rayfl(*command)
        assert result.exit_code == 0, result.output
        assert [one for one in caplog.messages if one == warning_of_deletion(directory.parent)] != []


def test_a_sweep_there_says_it_for_the_whole_sweep(
    package: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jobs.sweep.draw", lambda *_: None)
    result = rayfl("sweep", "small.toml", "sweep.seed=[1, 2]")
    assert result.exit_code == 0, result.output
    sentence = warning_of_deletion(package / "runs" / "small")
    assert sentence is not None and caplog.messages == [sentence]


def test_a_link_out_of_it_and_any_other_place_are_kept(package: Path, tmp_path: Path):
    (tmp_path / "shared").mkdir()
    (package / "runs").symlink_to(tmp_path / "shared")
    assert warning_of_deletion(package / "runs" / "small") is None
    assert "output.directory" not in rayfl("run", "small.toml").output
    (tmp_path / "link").symlink_to(package)
    assert warning_of_deletion(tmp_path / "link" / "other") is not None
    assert warning_of_deletion(Path("/home/me/working_dir_files/runs")) is None
