"""What a run directory says about its run: the experiment, copies of its input files, and the machines that compute.

The bits of a run depend on these machines, so platform.json is written as they report themselves.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfl.errors import RayflError, reason
from rayfl.limits.json_files import read_json
from rayfl.run_directory.disk import locked, write_json, write_text, write_whole
from rayfl.run_directory.part import Part

EXPERIMENT = "experiment.json"
"""A directory is a run's if it has this file."""
TOML = "experiment.toml"
PLATFORM = "platform.json"
PART = Part(
    (r"experiment\.json", r"experiment\.toml", r"platform\.json"),
    {
        "`experiment.json`, `experiment.toml`": "the experiment as it was resolved; the TOML file runs again",
        "`platform.json`": "builds and hardware as the actors report them, on which "
        "[the bits](../explanations/determinism.md) depend; `driver` and `mixed`: what other kinds of machine did",
    },
)
INPUT_FILES = Part(
    (r"files/[a-z]+-[0-9a-f]{12}(\..*)?",),
    {
        "`files/`": "copies of the files that the experiment names: its trace, its graph, the weights that it begins "
        "with, your code; a resumed run reads these and not the originals"
    },
)


def input_name(kind: str, digest: str, suffix: str) -> str:
    """The path in a run directory of the copy of an input file. `kind`: one word of small letters; it says what the
    file is; `digest`: 12 hexadecimal digits of its content; `suffix`: the ending of the original."""
    return f"files/{kind}-{digest}{suffix}"


# Any: settings of any type.
def describe_run(
    directory: Path,
    table: Mapping[str, Any],
    platform: Mapping[str, object] | None,
    toml: str,
    inputs: Mapping[str, bytes] | None = None,
) -> None:
    """Write what a run directory says about its run.

    Raise OSError if the disk refuses; RayflError if another process writes to the directory. table: the settings of the
    experiment, in which files are called as their copies are; toml: the same as text; inputs: the content of every copy
    by its path in the directory; platform: the machines that compute, or None on Ray before they are known.
    """
    with locked(directory):
        for name, content in (inputs or {}).items():
            copy = directory / name
            copy.parent.mkdir(exist_ok=True)
            if not copy.is_file() or copy.read_bytes() != content:
                write_whole(copy, lambda partial, content=content: partial.write_bytes(content))
        write_text(directory / TOML, toml)
        if platform is not None:
            write_platform(directory, platform)
        write_json(directory / EXPERIMENT, table)


def write_platform(directory: Path, platform: Mapping[str, object]) -> None:
    """Write which machines compute a run. Raise OSError if the disk refuses."""
    write_json(directory / PLATFORM, platform)


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run that was described."""
    return (directory / EXPERIMENT).is_file()


def read_experiment(directory: Path) -> Mapping[str, object]:
    """The settings of a run. Raise RayflError if the directory has none, or if they cannot be read."""
    if not is_run(directory):
        raise RayflError(
            f"{directory} is no run directory (it has no {EXPERIMENT}): name the directory that a run made"
        )
    return _read(directory / EXPERIMENT)


def read_platform(directory: Path) -> Mapping[str, object]:
    """What `write_platform` wrote; empty if nothing was computed yet. Raise RayflError if it cannot be read."""
    path = directory / PLATFORM
    return _read(path) if path.exists() or (directory / "records").exists() else {}


def _read(path: Path) -> Mapping[str, object]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise RayflError(f"{path} cannot be read ({why}): restore it, or run the experiment again") from None
