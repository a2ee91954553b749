"""The page of one run: loaded while its rounds are played, drawn while Ray ends."""

from contextlib import suppress
from pathlib import Path
from threading import Thread

from jobs.console import Audience
from rayfl.experiment.experiment import Experiment
from rayfl.run_directory.atomic_files import writing

DRAWING = "drawing the page"


def draw(directory: Path) -> None:
    """Draw it into the run directory. RayflError where that holds another page; DiskError where the disk refuses."""
    from rayfl.report.page import report

    with writing(directory, f"draw the page with: rayfl report {directory}"):
        report([directory], directory / "report.html")


class RunPage:
    """A run's page, if it has one: what drawing takes is loaded while rounds are played, and it is drawn while Ray
    ends."""

    def __init__(self, experiment: Experiment, directory: Path, audience: Audience) -> None:
        self.directory, self._wanted, self._audience = directory, experiment.output.report, audience
        # An executor in this process would wait for what is loaded beside it.
        self._loads = self._wanted and experiment.runtime.executor != "inline"
        self._drawing: Thread | None = None
        self._error: BaseException | None = None

    def load(self) -> None:
        """After a round: begin to load, once."""
        if self._loads:
            self._loads = False
            Thread(target=self._load, daemon=True).start()

    def _load(self) -> None:
        from rayfl.report.page import load_early

        # What is wrong is said by who draws.
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
        # It is raised where the page is waited for.
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def finish(self) -> None:
        """Wait until it is drawn. RayflError and DiskError as `draw`."""
        if self._drawing is not None:
            self._drawing.join()
        if self._error is not None:
            raise self._error
