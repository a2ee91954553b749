"""A run in TensorBoard, written by torch.utils.tensorboard."""

import threading
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from rayfl.run_directory.trackers.tracker import TrackedRun

FOLDER = "tensorboard"
"""Where the event files lie in the run directory."""


class TensorBoard:
    """Writes the experiment as text, its settings as hyper-parameters and the rounds' values as scalars.

    A process that resumes a run writes a file of its own, and TensorBoard then forgets the earlier values of the rounds
    that are played again. TensorBoard has no models. Raise OSError if writing fails.
    """

    def __init__(self, run: TrackedRun, num_recorded: int) -> None:
        """Begin a new file."""
        self._hook = threading.excepthook
        threading.excepthook = self._show
        self._writer = SummaryWriter(str(run.directory / FOLDER), purge_step=num_recorded)
        self._writer.add_text("experiment", run.markdown)
        # In this file: add_hparams would write a newer one, and TensorBoard then stops reading this one.
        begin, start, self._end = hparams(run.settings, {})
        assert self._writer.file_writer is not None
        self._file = self._writer.file_writer
        for summary in (begin, start):
            self._file.add_summary(summary)

    def round(self, round_number: int, values: Mapping[str, float]) -> None:
        """Write the values, with the round as the step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round_number)
        self._writer.flush()

    def model(self, path: Path) -> None:
        """Do nothing: TensorBoard has no artifacts."""

    def close(self, finished: bool) -> None:
        """End the file, and if the run is finished, the session of its hyper-parameters."""
        try:
            if finished:
                self._file.add_summary(self._end)
            self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _show(self, args: threading.ExceptHookArgs) -> None:
        """Show no traceback of TensorBoard's writing thread: the next write raises its error."""
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._hook(args)
