"""Where a run comes from: its command, when and where that was given, its folder's commit. It decides nothing."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from rayfl.limits.json_files import read_table
from rayfl.run_directory.atomic_files import write_json
from rayfl.run_directory.run_files import RunFiles

FILES = RunFiles(
    (r"origin\.json",),
    {
        "`origin.json`": "the command, when it was given, on which host, and the commit of the folder it was given in; "
        "nothing depends on it"
    },
)
NAMES = ("command", "started", "host", "commit")
_GIT_TIMEOUT_S = 5


def write_origin(directory: Path) -> None:
    """Write the origin of the run in `directory`, which this process begins. OSError where the disk refuses."""
    write_json(directory / "origin.json", origin(Path.cwd()))


def read_origin(directory: Path) -> Mapping[str, str]:
    """What was written, by `NAMES`; less of it, or nothing, where it cannot be read."""
    try:
        found = read_table(directory / "origin.json")
    except (OSError, ValueError):
        return {}
    return {name: found[name] for name in NAMES if isinstance(found.get(name), str)}


def origin(folder: Path) -> dict[str, str]:
    """Of this process, as if it worked in `folder`; without a commit where that is in no git repository."""
    program, *arguments = sys.argv or [""]
    # `python -m rayfl` has the path of rayfl/__main__.py there.
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    found = {
        "command": shlex.join([name or "python", *arguments]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
    }
    commit = _commit(folder)
    return {**found, "commit": commit} if commit else found


def _commit(folder: Path) -> str | None:
    """The commit of git's HEAD, "(changed)" where tracked files differ from it."""
    try:
        head = _git(folder, "rev-parse", "--verify", "HEAD")
        if head.returncode:
            return None
        changed = _git(folder, "diff-index", "--quiet", "HEAD", "--").returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.decode(errors="replace").strip()[:12] + (" (changed)" if changed else "")


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    # A monitor of files that the repository names would be a program that it starts.
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    return subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
