"""The folder into which Ray unpacks a submitted job's working directory, and which it soon deletes."""

import os
from pathlib import Path

_FOLDER = ("runtime_resources", "working_dir_files")
"""The path of such folders inside a session's directory."""


def warning(directory: Path) -> str | None:
    """A warning for the user if Ray will delete `directory`; None if it will not."""
    parts = Path(os.path.realpath(directory)).parts
    if not any(parts[place : place + 2] == _FOLDER for place in range(len(parts))):
        return None
    return (
        f"{directory} lies in the copy of the working directory that Ray unpacked for this job, which is deleted with "
        "the cluster or earlier: to keep results, give --output or output.directory an absolute path on permanent "
        "storage, or copy them before that"
    )
