"""A run in TensorBoard, in its own record format (it needs neither torch nor TensorFlow)."""

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
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.api_pb2 import Status as SessionStatus  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,  # pyright: ignore[reportAttributeAccessIssue]
    SessionEndInfo,  # pyright: ignore[reportAttributeAccessIssue]
    SessionStartInfo,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from rayfl.run_directory.trackers.tracker import Mark, Status, TrackedRun

FOLDER = "tensorboard"
"""Where the event files lie in the run directory."""
_FORMAT = "brain.Event:2"
"""The version in the first record of every event file."""
_STATUS: Mapping[Status, int] = {
    "finished": SessionStatus.Value("STATUS_SUCCESS"),
    "stopped": SessionStatus.Value("STATUS_UNKNOWN"),
    "failed": SessionStatus.Value("STATUS_FAILURE"),
}


class TensorBoard:
    """Writes the experiment as text, its settings as hyper-parameters and the rounds' values as scalars, at once.

    Tensorboard's own writer does it in a thread, which dies silently where the disk is full. A process that resumes a
    run writes a file of its own, with which TensorBoard forgets what earlier ones say of the rounds played again.
    Models it cannot hold. OSError where the disk refuses.
    """

    mark: Mark | None = None

    def __init__(self, run: TrackedRun, earlier: Mark | None, num_recorded: int) -> None:
        """A new file; all rounds are sent again where there is none yet."""
        directory = run.directory / FOLDER
        directory.mkdir(parents=True, exist_ok=True)
        resumed = any(directory.iterdir())
        self.next_round = num_recorded if resumed else 0
        self._file = _created(directory)
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version=_FORMAT))
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=self.next_round, session_log=start))
        self._add(Event(wall_time=time.time(), summary=text_pb("experiment", run.markdown)))
        self._hparams(hparams.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=_start(run)))

    def round(self, round: int, values: Mapping[str, float]) -> None:
        """Write one value a name at this step."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()])
        self._add(Event(wall_time=time.time(), step=round, summary=summary))

    def model(self, path: Path) -> None:
        """Do nothing: TensorBoard has no artifacts."""

    def close(self, status: Status) -> None:
        """End the file, and the session of these hyper-parameters."""
        with self._file:
            end = SessionEndInfo(status=_STATUS[status], end_time_secs=time.time())
            self._hparams(hparams.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))

    def _hparams(self, tag: str, data: HParamsPluginData) -> None:
        value = Summary.Value(tag=tag, metadata=hparams.create_summary_metadata(data), tensor=hparams.NULL_TENSOR)
        self._add(Event(wall_time=time.time(), summary=Summary(value=[value])))

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()


def _start(run: TrackedRun) -> SessionStartInfo:
    """The session of these hyper-parameters, which TensorBoard names after the run's folder."""
    start = SessionStartInfo(start_time_secs=time.time())
    for key, value in run.settings.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    return start


def _created(directory: Path) -> IO[bytes]:
    """Open a new file; TensorBoard sorts by the time in its name, in seconds."""
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    for number in count():
        try:
            return open(directory / f"{name}.{number}", "xb")  # open from round to round
        except FileExistsError:
            pass
    raise AssertionError("there is always a next number")
