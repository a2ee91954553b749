"""A run in Weights & Biases: offline files in the run directory unless WANDB_MODE says otherwise."""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

from rayfl.run_directory.trackers.tracker import Mark, Status, TrackedRun

FOLDER = "wandb"
"""Where wandb writes in the run directory."""
_LONGEST_NAME = 128
_LONGEST_TAG = 64


class WandbRun:
    """One run of W&B's, in the project of the run's experiment (or WANDB_PROJECT).

    A resumed run has the same id. Offline every process writes a folder of its own, and `wandb sync` puts the folders
    of one id together in the order of their times.
    """

    def __init__(self, run: TrackedRun, earlier: Mark | None, num_recorded: int) -> None:
        """Go on with the earlier run where the mode is the same, or begin one. Raises what wandb raises."""
        mode = os.environ.get("WANDB_MODE") or "offline"
        goes_on = earlier is not None and earlier.place == mode
        name = earlier.run if earlier is not None and goes_on else secrets.token_hex(4)
        self._folder = run.directory / FOLDER
        # What a killed process sent last is not there: wandb's own process writes later, and ends with it.
        written = next_step(self._folder, name)
        tags = dict.fromkeys((*run.chosen("method", "data").values(), *run.tags))
        self._run = wandb.init(
            dir=str(run.directory),
            id=name,
            resume="allow",
            # A run of its own, also where the program has one.
            reinit="create_new",
            project=(os.environ.get("WANDB_PROJECT") or run.project)[:_LONGEST_NAME],
            name=run.name[:_LONGEST_NAME],
            group=run.group[:_LONGEST_NAME] if run.group else None,
            tags=[tag[:_LONGEST_TAG] for tag in tags],
            notes=run.markdown,
            config=dict(run.experiment),
            # wandb's type is the list of the modes.
            mode=mode,  # pyright: ignore[reportArgumentType]
            settings=wandb.Settings(
                silent=True,
                console="off",
                symlink=False,
                disable_git=True,
                save_code=False,
                # Of the coordinator, which computes nothing.
                x_disable_stats=True,
            ),
        )
        self._remove_links()
        # Of an online run only the server knows.
        self.next_round: int = written if mode == "offline" else self._run.starting_step
        self.mark: Mark | None = Mark(mode, name, self.next_round)

    def round(self, round: int, values: Mapping[str, float]) -> None:
        """One step with all values of the round."""
        self._run.log({name: float(value) for name, value in values.items()}, step=round, commit=True)

    def model(self, path: Path) -> None:
        """An artifact of the type model, whose bytes stay where they are until they are uploaded."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{self._run.id}-{path.stem}")
        artifact = wandb.Artifact(name, type="model")
        artifact.add_file(str(path), skip_cache=True, policy="immutable")
        self._run.log_artifact(artifact)

    def close(self, status: Status) -> None:
        """End this process's part; anything but a finished run counts as failed there."""
        self._run.finish(exit_code=0 if status == "finished" else 1)
        self._remove_links()

    def _remove_links(self) -> None:
        """wandb links its service's log; a run directory has no links, through which a run would write elsewhere."""
        for path in self._folder.glob("*/logs/*"):
            if path.is_symlink():
                path.unlink()


def next_step(folder: Path, name: str) -> int:
    """The first step that the offline files of a run lack."""
    steps = [
        json.loads(item.value_json)
        for record in offline_records(folder, name)
        if record.WhichOneof("record_type") == "history"
        for item in record.history.item
        if "_step" in (item.key, *item.nested_key)
    ]
    return max(steps, default=-1) + 1


# Any: protobuf builds the class of a record.
def offline_records(folder: Path, name: str) -> Iterator[Any]:
    """The records in the offline files of a run, by time; a file may be cut anywhere."""
    for path in sorted(folder.glob(f"offline-run-*/run-{name}.wandb")):
        for data in _entries(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            yield record


def _entries(content: bytes) -> Iterator[bytes]:
    """The entries of a file in LevelDB's log format, which begins with 7 bytes of wandb's own.

    Blocks of 32 KiB; an entry is one chunk or several, each behind its checksum (4 bytes), length (2) and kind (1):
    1 whole, 2 first, 3 middle, 4 last.
    """
    at, entry = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        entry += content[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(content) or not kind:
            return
        if kind in (1, 4):
            yield entry
            entry = b""
