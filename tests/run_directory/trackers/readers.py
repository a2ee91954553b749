"""What the trackers hold of a run, read with their own packages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

Points = list[tuple[int, float]]
"""Step and value, in the order in which they were sent."""


def tensorboard(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def wandb_records(directory: Path) -> Iterator[Any]:
    """The records of all offline files, by time, as `wandb sync` would send them."""
    for path in sorted((directory / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in _entries(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            yield record


def points(tracker: str, directory: Path, name: str) -> Points:
    """One metric's values in a tracker."""
    if tracker == "tensorboard":
        return [(event.step, event.value) for event in tensorboard(directory).Scalars(name)]
    found = []
    for record in wandb_records(directory):
        if record.WhichOneof("record_type") == "history":
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if name in values:
                found.append((int(values["_step"]), values[name]))
    return found


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
