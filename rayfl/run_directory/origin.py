"""Where a run comes from: its command, when and where it was given, the commit of its folder. It decides no number."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from rayfl.limits.json_files import read_json
from rayfl.run_directory.disk import write_json
from rayfl.run_directory.part import Part

PART = Part(
    (r"origin\.json",),
    {
        "`origin.json`": "the command, when it was given, on which host, and the commit of the folder it was given in; "
        "nothing depends on it"
    },
)
NAMES = ("command", "started", "host", "commit")
_GIT_TIMEOUT_S = 5


def write_origin(directory: Path) -> None:
    """Write the origin of the run that this process begins in `directory`. Raise OSError if the disk refuses."""
    write_json(directory / "origin.json", origin(Path.cwd()))


def read_origin(directory: Path) -> Mapping[str, str]:
    """What `write_origin` wrote, by `NAMES`; what cannot be read is left out."""
    try:
        found = read_json(directory / "origin.json")
    except (OSError, ValueError):
        return {}
    return {name: found[name] for name in NAMES if isinstance(found.get(name), str)}


def origin(folder: Path) -> dict[str, str]:
    """The origin of a run that this process begins in `folder`; without a commit if that is in no git repository."""
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
    """The commit of git's HEAD, with "(changed)" if tracked files differ from it; None without a repository."""
    # A repository may name a program as its monitor of files, which git would start.
    command = ["git", "-C", str(folder), "--no-optional-locks", "-c", "core.fsmonitor=false", "describe"]
    command += ["--always", "--exclude=*", "--abbrev=12", "--dirty= (changed)"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
