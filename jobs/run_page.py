"""Draw the pages of runs. On Ray, a run loads the drawing modules during its rounds, and draws while Ray shuts down."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jobs.console import Audience
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.report_options import ReportOptions
from rayfl.run_directory.disk import writing
from rayfl.run_directory.run_folder import RunFolder

DRAWING = "drawing the page"


def draw(
    directory: Path,
    runs: Sequence[Path] = (),
    name: str = "report.html",
    options: ReportOptions | None = None,
    overwrite: bool = False,
) -> Path:
    """Draw the page of the run in `directory`, or of several `runs`, into the directory; returns its path.

    Raise RayflError if the file there is no page of rayfl, DiskError if it cannot be written.
    """
    from rayfl.report.page import report

    with writing(directory, f"draw the page with: rayfl report {directory}"):
        return report(runs or [directory], directory / name, options, overwrite)


def finish_up(folder: RunFolder, page: bool, audience: Audience) -> bool:
    """Draw the page of a finished run if it is missing; copy the run if its copy is behind.

    `page`: whether the run should have a page. Return True if the page was drawn or the run was copied.
    """
    page = page and not (folder.directory / "report.html").exists()
    if page:
        audience.display.stage(DRAWING)
        draw(folder.directory)
    behind = folder.is_copy_behind()
    if behind:
        audience.display.stage(f"copying to {folder.url}")
        with folder.mirrored():
            pass
    return page or behind


class RunPage:
    """Draws the page of a run, if the run is to have one, in a thread of its own."""

    def __init__(self, experiment: Experiment, directory: Path, audience: Audience) -> None:
        self.directory, self._wanted, self._audience = directory, experiment.output.report, audience
        # Loading would delay the rounds of an executor in this process.
        self._loads = self._wanted and experiment.runtime.executor != "inline"
        self._thread = ThreadPoolExecutor(1, "rayfl.page")
        self._drawn: Future[Path] | None = None

    def load(self) -> None:
        """Begin to load the modules that draw; the first round calls it, later calls do nothing."""
        if self._loads:
            self._loads = False
            # If loading fails, drawing reports the error.
            self._thread.submit(_load)

    def begin(self) -> None:
        """Begin to draw."""
        if self._wanted:
            self._audience.display.stage(DRAWING)
            self._drawn = self._thread.submit(draw, self.directory)

    def finish(self) -> None:
        """Wait until the page is drawn. Errors are those of `draw`."""
        if self._drawn is not None:
            self._drawn.result()


def _load() -> None:
    from rayfl.report.page import load_early

    load_early()
