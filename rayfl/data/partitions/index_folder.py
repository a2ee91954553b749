"""A partition as a folder with the examples of each client in an .npy file, as NVFlare writes it."""

import json
from pathlib import Path

from rayfl.limits.npy import read_npy


def folder_content(folder: Path) -> bytes:
    """A folder with an .npy file for each client, as the JSON text of a partition. Raise ValueError if it has none."""
    clients = {file.stem: read_npy(file).tolist() for file in sorted(folder.glob("*.npy"))}
    if not clients:
        raise ValueError("it is a folder without .npy files")
    return json.dumps(clients).encode()
