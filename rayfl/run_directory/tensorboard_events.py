"""Scalars for TensorBoard, in tensorboard's own record format (it needs neither torch nor TensorFlow)."""

import os
import socket
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO

# protobuf builds these classes when the modules are imported, where pyright cannot see them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

_FORMAT = "brain.Event:2"
"""The version in the first record of every event file."""


class EventWriter:
    """Appends scalars to a new event file in `directory` at once; OSError where the disk refuses.

    Tensorboard's own writer does it in a thread, which dies silently where the disk is full."""

    def __init__(self, directory: Path, purge_from: int | None) -> None:
        """`purge_from`: TensorBoard forgets what earlier files say of this step and later ones (a resumed run)."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file = _created(directory)
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version=_FORMAT))
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=purge_from, session_log=start))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one value a name at `step`."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()])
        self._add(Event(wall_time=time.time(), step=step, summary=summary))

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


def _created(directory: Path) -> IO[bytes]:
    """Open a new file; TensorBoard sorts by the time in its name, in seconds."""
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    for number in count():
        try:
            return open(directory / f"{name}.{number}", "xb")  # open from round to round
        except FileExistsError:
            pass
    raise AssertionError("there is always a next number")
