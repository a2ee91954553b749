"""Scalars for TensorBoard, through tensorboard's own event writer (it needs neither torch nor TensorFlow)."""

import time
from collections.abc import Mapping
from pathlib import Path

# protobuf builds these classes when the modules are imported, where pyright cannot see them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

_FLUSH_S = 10


class EventWriter:
    """Appends scalars to a new event file in `directory`; its thread writes them out every few seconds."""

    def __init__(self, directory: Path, purge_from: int | None) -> None:
        """`purge_from`: TensorBoard forgets what earlier files say of this step and later ones (a resumed run)."""
        self._writer = EventFileWriter(str(directory), flush_secs=_FLUSH_S)
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=purge_from, session_log=start))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one value a name at `step`."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write out what is waiting."""
        self._writer.close()
