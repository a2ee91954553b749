"""The description in a run directory: the experiment, copies of its input files, the machines, the origin, the user's
note and tags, and the facts of the metrics, without which a report of a later day would need their classes.

The bits of a run depend on the machines, so platform.json has what the machines report about themselves.
"""

import json
import platform as system
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, TypeVar

from rayfl import toml
from rayfl.errors import RayflError, reason
from rayfl.limits.json_files import read_json
from rayfl.metrics.facts import RECORDED_BEFORE, Facts
from rayfl.run_directory.disk import RunFiles, locked, write_json, write_text, write_whole
from rayfl.settings import Settings

EXPERIMENT = "experiment.json"
"""A directory is a run directory if it has this file."""
TOML = "experiment.toml"
PLATFORM = "platform.json"
METRICS = "metrics.json"
RESOURCES = "resources.json"
NOTES = "notes.json"
PART = RunFiles(
    (*(rf"{name}\.json" for name in ("experiment", "platform", "origin", "metrics", "resources")), r"experiment\.toml"),
    {
        "`experiment.json`, `experiment.toml`": "the experiment as it was resolved; a copy of the TOML file "
        "can be edited and run",
        "`platform.json`": "builds and hardware as the actors report them, on which "
        "[the bits](../explanations/determinism.md) depend; `driver` and `mixed`: the other kinds that took part",
        "`origin.json`": "the command, when it was given, on which host, and the commit of rayfl; "
        "nothing depends on it",
        "`metrics.json`": "of every value that is evaluated: its title, unit and range, whether higher is better, and "
        "what a page draws of it",
        "`resources.json`": "hours of CPU and GPU, the peak memory of the largest process and, where NVML measures it, "
        "the energy of the GPUs, up to the last checkpoint or the end; nothing depends on it",
    },
)
NOTES_FILE = RunFiles((r"notes\.json",), {"`notes.json`": "the note and the tags that `rayfl note` gave to the run"})
ORIGIN = ("command", "started", "host", "commit")
"""The entries of origin.json; the commit is missing if rayfl was installed from no repository."""
_GIT_TIMEOUT_S = 5
_PACKAGE = Path(__file__).parents[1]
_Content = TypeVar("_Content")
INPUT_FILES = RunFiles(
    (r"files/[a-z]+-[0-9a-f]{12}(-\w+)?(\..*)?", "files/plugin-[0-9a-f]{12}/.+"),
    {
        "`files/`": "copies of the files that the experiment names: its trace, its graph, the weights that it begins "
        "with, your code and what it imports and reads from its folder; a resumed run reads these and not the originals"
    },
)


def input_name(kind: str, digest: str, suffix: str) -> str:
    """The path in a run directory of the copy of an input file. `kind`: what the file is, one lower-case
    word; `digest`: 12 hexadecimal digits of its content; `suffix`: the ending of the original."""
    return f"files/{kind}-{digest}{suffix}"


@dataclass(frozen=True)
class Description:
    """An experiment as its run directory describes it.

    `table`: its settings, with the paths of the copies in place of those of its files; `contents`: the content of each
    copy by its path in the directory; `platform`: that of the process that prepared the run.
    """

    # Any: settings of any type.
    table: Mapping[str, Any]
    contents: Mapping[str, bytes] = field(default_factory=dict)
    platform: Mapping[str, object] = field(default_factory=dict)

    def write(self, directory: Path, machines: Mapping[str, object] | None, begins: bool = False) -> None:
        """Write it into a run directory, with the machines that compute; None on Ray before they are known.

        `begins`: whether this process begins the run, whose origin is then written too. Raise OSError if writing fails.
        Raise RayflError if another process writes to the directory.
        """
        text = toml.dumps(self.table)
        with locked(directory):
            # The TOML file comes last: an older one is never beside a newer experiment, and a folder in which there is
            # only the user's own experiment.toml is not taken for what a killed run left.
            (directory / TOML).unlink(missing_ok=True)
            for name, content in self.contents.items():
                copy = directory / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                if not copy.is_file() or copy.read_bytes() != content:
                    write_whole(copy, lambda partial, content=content: partial.write_bytes(content))
            if machines is not None:
                write_json(directory / PLATFORM, machines)
            write_json(directory / EXPERIMENT, self.table)
            write_text(directory / TOML, text)
        if begins:
            write_origin(directory)


def is_left_over(name: str) -> bool:
    """Whether a killed run may have left this entry in a directory without an experiment."""
    return name.removesuffix(".partial") in ("files", PLATFORM, EXPERIMENT)


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run whose experiment was written."""
    return (directory / EXPERIMENT).is_file()


def read_experiment(directory: Path) -> Mapping[str, object]:
    """The settings of a run. Raise RayflError if the directory has none, or if they cannot be read."""
    if not is_run(directory):
        raise RayflError(
            f"{directory} is not a run directory ({EXPERIMENT} is missing there): name the directory of a run"
        )
    return read_as(dict, directory / EXPERIMENT)


def read_platform(directory: Path) -> Mapping[str, object]:
    """The machines that compute a run; empty if nothing was computed yet. Raise RayflError if it cannot be read."""
    path = directory / PLATFORM
    return read_as(dict, path) if path.exists() or (directory / "records").exists() else {}


def write_metric_facts(directory: Path, facts: Mapping[str, Facts]) -> None:
    """Write the facts of every value, by its name without the place. Raise OSError if writing fails."""
    write_json(directory / METRICS, {name: value_facts.model_dump() for name, value_facts in facts.items()})


def read_metric_facts(directory: Path) -> Mapping[str, Facts]:
    """What `write_metric_facts` wrote; before it did, loss and accuracy. Raise RayflError if it is damaged."""
    path = directory / METRICS
    if not path.exists():
        return RECORDED_BEFORE
    return read_as(lambda **entries: {name: Facts(**value_facts) for name, value_facts in entries.items()}, path)


def read_resources(directory: Path) -> dict[str, float]:
    """What a run has used of its machines; {} if that is not known."""
    return read_as(lambda **used: {name: float(value) for name, value in used.items()}, directory / RESOURCES, {})


def read_as(make: Callable[..., _Content], path: Path, default: _Content | None = None) -> _Content:
    """What `make` makes of the entries of a JSON file of a run. If it cannot be read, return the default; raise
    RayflError if there is none."""
    try:
        return make(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        if default is not None:
            return default
        raise RayflError(f"{path} cannot be read ({reason(error)}): restore it, or run the experiment again") from None


class Notes(Settings):
    """A sentence about a run, and words by which it is found. No number depends on them; a copy and a resumed run keep
    them."""

    note: str = ""
    tags: tuple[str, ...] = ()


def read_notes(directory: Path) -> Notes:
    """The note and tags of a run; empty if it has none, or if they cannot be read."""
    return read_as(Notes, directory / NOTES, Notes())


def write_notes(directory: Path, notes: Notes) -> None:
    """Give a run a note and tags. Raise OSError if writing fails, RayflError for a tag that could not be searched."""
    if wrong := [tag for tag in notes.tags if not tag or any(letter in tag for letter in ", =")]:
        raise RayflError(f"tag {wrong[0]!r} is not allowed; use letters without spaces, commas and '='")
    write_json(directory / NOTES, notes.model_dump(mode="json"))


def write_origin(directory: Path) -> None:
    """Write the origin of the run that this process begins in `directory`; write none if anything fails."""
    # A current folder that is gone, arguments that a caller of Python has replaced: no result depends on them.
    with suppress(Exception):
        write_json(directory / "origin.json", origin(Path.cwd()))


def read_origin(directory: Path) -> Mapping[str, str]:
    """The entries that `write_origin` wrote, without those that cannot be read."""
    entries = read_as(dict, directory / "origin.json", {})
    return {name: entries[name] for name in ORIGIN if isinstance(entries.get(name), str)}


def origin(folder: Path, package: Path = _PACKAGE) -> dict[str, str]:
    """The origin of a run that this process begins in `folder`, from which its paths begin; without a commit if that of
    rayfl's `package` is unknown."""
    program, *arguments = sys.argv or [""]
    # `python -m rayfl` has the path of rayfl/__main__.py there.
    name = Path(program.removesuffix("/__main__.py")).name
    commit = _commit(package)
    inside = re.compile(rf"^([\w.]+=|--[\w-]+=|){re.escape(str(folder))}/")
    return {
        "command": shlex.join([name or "python", *(inside.sub(r"\1", argument) for argument in arguments)]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": system.node(),
        **({"commit": commit} if commit else {}),
    }


def _commit(package: Path) -> str | None:
    """The commit of the repository that has the package, with "(changed)" if tracked files differ from it; else the one
    that pip installed. None if neither is known."""
    # A repository may set a program that monitors its files, which git would start.
    git = ["git", "-C", str(package), "--no-optional-locks", "-c", "core.fsmonitor=false"]
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty= (changed)"]
    # An environment may lie in a repository that does not have its packages.
    for arguments in (["ls-files", "--error-unmatch", "__init__.py"], describe):
        try:
            done = subprocess.run([*git, *arguments], capture_output=True, timeout=_GIT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return _installed_commit()
    return done.stdout.decode(errors="replace").strip()


def _installed_commit() -> str | None:
    """The commit that pip fetched from a repository and installed; None if it installed something else."""
    with suppress(Exception):
        return json.loads(distribution("rayfl").read_text("direct_url.json") or "")["vcs_info"]["commit_id"][:12]
    return None
