"""A file that a user names is written where nothing is, or over its own kind; everything else stays."""

import errno
import os
from pathlib import Path

import pytest

from rayfl.run_directory.run_files import REPORT, OutputKind, write_output
from tests.refusals import refused

MARK = b" - rayfl report</title>"
UNMARKED = OutputKind("a picture")


def unwritten(path: Path, kind: OutputKind, overwrite: bool, names: list[str]) -> None:
    """The file is refused for these reasons, and stays as it was."""
    before = path.read_bytes() if path.is_file() else None
    with refused(names=[path.name, *names]):
        write_output(path, b"new", kind, overwrite)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not list(path.parent.glob(".rayfl-*"))


@pytest.mark.parametrize("kind", [REPORT, UNMARKED])
def test_only_its_own_kind_is_replaced_unasked(kind: OutputKind, tmp_path: Path):
    """A picture has no mark, so that not even another picture is replaced."""
    path = tmp_path / "file"
    write_output(path, b"<title>x" + MARK + b"1", REPORT)
    write_output(path, b"<title>x" + MARK + b"2", REPORT)
    assert path.read_bytes().endswith(b"2")
    unwritten(path, UNMARKED, False, ["already", "--overwrite"])
    for content in (b"", b"mine", b" " * (1 << 17) + MARK):
        path.write_bytes(content)
        unwritten(path, kind, False, ["already"])
    write_output(path, b"new", kind, overwrite=True)
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_directory_are_never_written_to(tmp_path: Path):
    target = tmp_path / "mine"
    target.write_bytes(MARK)
    link, dangling, circle = (tmp_path / name for name in ("link", "dangling", "circle"))
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "nothing")
    circle.symlink_to(circle)
    for path in (link, dangling, circle, Path("/dev/null")):
        unwritten(path, REPORT, True, ["regular file"])
    unwritten(tmp_path, REPORT, True, ["directory"])
    unwritten(circle / "page.html", REPORT, True, [os.strerror(errno.ELOOP).lower()])
    assert target.read_bytes() == MARK and not (tmp_path / "nothing").exists()


def test_a_partial_file_of_somebody_else_stays(tmp_path: Path):
    (tmp_path / "page.html.partial").write_text("mine")
    write_output(tmp_path / "page.html", b"new", REPORT)
    assert (tmp_path / "page.html.partial").read_text() == "mine"


def test_a_run_directory_takes_its_report_and_nothing_else(tmp_path: Path):
    run = tmp_path / "run"
    (run / "records").mkdir(parents=True)
    for name in ("experiment.json", "platform.json", "experiment.toml", "records/rounds.parquet"):
        (run / name).write_text("{}")
    (tmp_path / "link").symlink_to(run / "records")
    names = ("experiment.json", "records/rounds.parquet", "page.html", "models/new/report.html")
    for path in (*(run / name for name in names), tmp_path / "link" / "rounds.parquet", run / "records" / ".." / "x"):
        unwritten(path, REPORT, True, ["run directory", "run/report.html"])
    unwritten(run / "report.html", UNMARKED, True, ["run directory"])
    write_output(run / "report.html", MARK, REPORT)


def test_an_error_of_the_disk_names_the_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as raised:
        write_output(tmp_path / "missing" / "page.html", b"", REPORT)
    assert raised.value.filename == str(tmp_path / "missing" / "page.html")
