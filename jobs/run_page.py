"""The page of one run: its modules are loaded while rounds are played, and it is drawn while Ray ends."""

from contextlib import suppress
from pathlib import Path
from threading import Thread

from jobs.console import Audience
from rayfl.experiment.experiment import Experiment
from rayfl.run_directory.atomic_files import writing

DRAWING = "drawing the page"


def draw(directory: Path) -> None:
    """Draw the page of a run into its directory. RayflError if another page is there; DiskError if the disk refuses."""
    from rayfl.report.page import report

    with writing(directory, f"draw the page with: rayfl report {directory}"):
        report([directory], directory / "report.html")


class RunPage:
    """Draws the page of a run, if the run is to have one, in a thread of its own."""

    def __init__(self, experiment: Experiment, directory: Path, audience: Audience) -> None:
        self.directory, self._wanted, self._audience = directory, experiment.output.report, audience
        # Loading would delay the rounds of an executor in this process.
        self._loads = self._wanted and experiment.runtime.executor != "inline"
        self._drawing: Thread | None = None
        self._error: BaseException | None = None

    def load(self) -> None:
        """Begin to load the modules that draw; the first round calls it, later calls do nothing."""
        if self._loads:
            self._loads = False
            Thread(target=self._load, daemon=True).start()

    def _load(self) -> None:
        from rayfl.report.page import load_early

        # Drawing reports the error.
        with suppress(Exception):
            load_early()

    def begin(self) -> None:
        """Begin to draw."""
        if self._wanted:
            self._audience.stage(DRAWING)
            self._drawing = Thread(target=self._draw, daemon=True)
            self._drawing.start()

    def _draw(self) -> None:
        try:
            draw(self.directory)
        # `finish` raises it.
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def finish(self) -> None:
        """Wait until the page is drawn. Errors are those of `draw`."""
        if self._drawing is not None:
            self._drawing.join()
        if self._error is not None:
            raise self._error
