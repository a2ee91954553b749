"""The folder into which Ray unpacks the working directory of a submitted job: what is written there is soon gone."""

import os
from pathlib import Path

_FOLDER = ("runtime_resources", "working_dir_files")
"""Where Ray keeps such folders in a session's directory, wherever that lies."""


def warning(directory: Path) -> str | None:
    """What to tell the user of results in `directory`; None where they stay."""
    parts = Path(os.path.realpath(directory)).parts
    if not any(parts[place : place + 2] == _FOLDER for place in range(len(parts))):
        return None
    return (
        f"{directory} lies in the copy of the working directory that Ray unpacked for this job, which is deleted with "
        "the cluster or before: to keep results, give --output or output.directory an absolute path on storage that "
        "stays, or copy them from there before"
    )
