"""What a run says of where it comes from."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rayfl.run_directory.description import origin, read_origin, write_origin


@pytest.mark.parametrize("program", ["/usr/bin/rayfl", "/some/where/rayfl/__main__.py"])
def test_the_command_can_be_given_again(program, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("sys.argv", [program, "run", "my file.toml", "rounds=3"])
    write_origin(tmp_path)
    found = read_origin(tmp_path)
    assert found["command"] == "rayfl run 'my file.toml' rounds=3"
    assert found["started"].endswith("+00:00") and found["host"]


@pytest.mark.parametrize("arguments", [[Path("of a program that starts rayfl"), 3], ["x"]])
def test_an_origin_that_cannot_be_written_is_left_out(
    arguments: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("sys.argv", arguments)
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    write_origin(tmp_path)
    assert read_origin(tmp_path) == {}


def test_what_cannot_be_read_is_nothing(tmp_path: Path):
    assert read_origin(tmp_path) == {}
    (tmp_path / "origin.json").write_text('{"command": 3, "host": "here", "more": "x"}')
    assert read_origin(tmp_path) == {"host": "here"}
    (tmp_path / "origin.json").write_text("[]")
    assert read_origin(tmp_path) == {}


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_commit_of_the_package_and_whether_it_was_changed(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], capture_output=True, check=True, text=True)
        return done.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("one")
    assert "commit" not in origin(tmp_path, package)
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    # As site-packages of an environment in somebody's repository.
    assert "commit" not in origin(tmp_path, package)
    git("add", "package")
    git("commit", "-q", "-m", "two")
    commit = git("rev-parse", "HEAD")[:12]
    assert origin(tmp_path, package)["commit"] == commit
    (package / "__init__.py").write_text("another one")
    assert origin(tmp_path, package)["commit"] == f"{commit} (changed)"
