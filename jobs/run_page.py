"""Draw the pages of runs, and complete what a killed process left undone."""

from collections.abc import Sequence
from pathlib import Path

from jobs.console import Audience
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
