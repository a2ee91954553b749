"""The commands `prune`, `pack` and `note`: what is kept of runs, what is shared of them, and what is said about them.

Nothing here loads torch or Ray.
"""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from rich.filesize import decimal

from jobs.display import say
from rayfl.errors import RayflError
from rayfl.report.summary import runs_below, state_of
from rayfl.report.wording import counted
from rayfl.run_directory.description import Notes, is_run, read_notes, write_notes
from rayfl.run_directory.disk import CHECKPOINTS, locked, writing
from rayfl.run_directory.outputs import OutputKind, write_output
from rayfl.run_directory.record import read_run
from rayfl.run_directory.run_files import own_files, require_no_links
from rayfl.run_directory.run_folder import LOCAL

_TEXTS = {".json", ".toml", ".html"}
"""Endings of the files in which paths of this machine are replaced."""
_LEFT_OUT = (f"{CHECKPOINTS}/", "tensorboard/", "wandb/")
"""What is not packed: states of unfinished work, and files of trackers, which have names of users and machines."""


def prune(folders: Sequence[Path], dry_run: bool) -> None:
    """Remove the checkpoints of the finished runs in folders, by default in runs/, and print the bytes of each run."""
    total = 0
    for directory in (run for folder in folders or [LOCAL.absolute()] for run in runs_below(folder)):
        checkpoints = directory / CHECKPOINTS
        if not checkpoints.is_dir() or checkpoints.is_symlink():
            continue
        run = read_run(directory, leave_out=("clients", "metrics"))
        if state_of(run) != "finished":
            say(f"{directory}: {state_of(run)}, its checkpoints stay")
            continue
        require_no_links(directory)
        # A file that has several links there counts once.
        sizes = {path.stat().st_ino: path.stat().st_size for path in checkpoints.rglob("*") if path.is_file()}
        if not dry_run:
            with locked(directory), writing(directory, "prune again"):
                shutil.rmtree(checkpoints)
        total += sum(sizes.values())
        say(f"{directory}: {decimal(sum(sizes.values()))}")
    say(f"{decimal(total)} {'would be freed: leave out --dry-run' if dry_run else 'freed'}")


def pack(directories: Sequence[Path], output: Path | None, overwrite: bool) -> None:
    """Write runs, or the runs of sweeps, to a .tar.gz file that can be shared: without checkpoints, files of trackers
    and the host, and with ~ in place of the user's home in paths.

    Raise RayflError if a run is still running, if there is none, or if the file exists.
    """
    first = directories[0].resolve()
    target = output or Path(f"{first.name}.tar.gz").absolute()
    runs = [run for directory in directories for run in runs_below(directory)]
    if not runs:
        raise RayflError(f"there is no run in {', '.join(map(str, directories))}; name the directory of a run or sweep")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for run in runs:
            if state_of(read_run(run, leave_out=("clients", "metrics"))) == "running":
                raise RayflError(f"{run} is running; pack it when it has ended")
            home = next(directory for directory in directories if run.is_relative_to(directory))
            for name in own_files(run):
                if not name.startswith(_LEFT_OUT):
                    # Neither the user's name nor their number: an entry made from a file would have both.
                    entry = tarfile.TarInfo(str(Path(home.resolve().name, run.relative_to(home), name)))
                    # The names of copies of input files follow from their content.
                    data = (run / name).read_bytes() if name.startswith("files/") else _shared(run / name)
                    entry.size, entry.mtime = len(data), int((run / name).stat().st_mtime)
                    archive.addfile(entry, io.BytesIO(data))
    write_output(target, content.getvalue(), OutputKind("an archive"), overwrite)
    say(f"{target}: {counted(len(runs), 'run')}, {decimal(content.tell())}; unpack it with: tar xzf {target.name}")


def _shared(path: Path) -> bytes:
    """The content of a run's file, with ~ for the user's home and relative paths for those in the current folder."""
    if path.suffix not in _TEXTS:
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.name == "origin.json":
        text = json.dumps({name: value for name, value in json.loads(text).items() if name != "host"}, indent=2)
    for place, instead in ((f"{Path.cwd()}/", ""), (str(Path.home()), "~")):
        # JSON escapes letters that are not ASCII.
        for written in {place, json.dumps(place)[1:-1]} if len(place) > 1 else ():
            text = re.sub(rf"{re.escape(written)}(?![\w.-])" if instead else re.escape(written), instead, text)
    return text.encode()


def note(directory: Path, text: str | None, tags: Sequence[str], untagged: Sequence[str]) -> None:
    """Set the note of a run, add tags and remove some; print what it has."""
    if not is_run(directory):
        raise RayflError(f"{directory} is not a run directory; name the directory of a run")
    before = read_notes(directory)
    kept = tuple(tag for tag in dict.fromkeys([*before.tags, *tags]) if tag not in untagged)
    notes = Notes(note=before.note if text is None else text, tags=kept)
    if notes != before:
        with writing(directory, "give the note again"):
            write_notes(directory, notes)
    say(f"{directory}: {notes.note or 'no note'}; tags: {', '.join(notes.tags) or 'none'}")
