"""What the commands `report`, `compare`, `ls` and `show` print of runs. Nothing here loads torch or Ray."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jobs.display import Display
from jobs.run_tables import comparison_tables, description, list_table, result_table, standing
from jobs.standard_output import print_table
from rayfl.errors import RayflError
from rayfl.experiment.report_options import ReportOptions, agreed_options
from rayfl.report.comparison import require
from rayfl.report.overview import overviews
from rayfl.report.summary import summary
from rayfl.report.wording import counted
from rayfl.run_directory.fetching import copies_for_listing, copy_for_reading
from rayfl.run_directory.record import Run, read_run, run_directories


def print_json(places: Sequence[Path | str], display: Display) -> None:
    """Print the numbers of runs as JSON."""
    found = _runs(places, display)
    display.close()
    print(json.dumps([summary(run) for run in found], indent=2))


def write_page(
    places: Sequence[Path | str], output: Path | None, given: Mapping[str, object], overwrite: bool, display: Display
) -> None:
    """Write a page about runs, and print its tables and its path. `given`: options of `[report]`."""
    found = _runs(places, display)
    options = _agreed(found, given)
    display.stage("drawing the page")
    from rayfl.report.page import report

    name = "report.html" if len(found) == 1 else "comparison.html"
    here = places[0] if len(places) == 1 and isinstance(places[0], Path) else Path().absolute()
    page = report([run.directory for run in found], output or here / name, options, overwrite)
    display.close()
    if len(found) > 1:
        print_comparison(found, options)
    else:
        print_table(result_table(summary(found[0])), 100)
    print(f"report: {page}")


def compare(places: Sequence[Path | str], given: Mapping[str, object], display: Display) -> None:
    """Print runs side by side. `given`: options of `[report]`."""
    found = _runs(places, display)
    options = _agreed(found, given)
    display.close()
    print_comparison(found, options)


def list_runs(place: Path | str, display: Display) -> None:
    """Print a list of the runs in a folder, or below a URL."""
    display.stage("reading the runs")
    folder = place
    if isinstance(folder, str):
        folder = copies_for_listing(folder)
    if not folder.is_dir():
        raise RayflError(f"there is no folder {place}; name the one in which your runs lie")
    found = overviews(folder)
    if isinstance(place, str):
        found = [replace(one, state="unfinished") if one.state == "stopped" else one for one in found]
    display.close()
    if found:
        print_table(list_table(folder, found), 120)
    print(f"{counted(len(found), 'run') if found else 'no runs'} in {place}")


def show(place: Path | str, display: Display) -> None:
    """Print the experiment, the platform and the results of a run."""
    display.stage("reading the run")
    run = read_run(_to_read(place))
    results = result_table(summary(run))
    display.close()
    print(description(run))
    print_table(results, 100)
    print(standing(run, place if isinstance(place, str) else None))


def _runs(places: Sequence[Path | str], display: Display) -> list[Run]:
    """The runs in directories and at URLs; a sweep's directory stands for all its runs."""
    display.stage("reading the runs")
    found = []
    for place in places:
        directories = [_to_read(place)] if isinstance(place, str) else run_directories(place)
        found += [read_run(directory) for directory in directories]
    return found


def _to_read(place: Path | str) -> Path:
    """The directory of a run; of a URL, a local copy."""
    if isinstance(place, Path):
        return place
    return copy_for_reading(place, ("checkpoints/", "models/global", "tensorboard/", "mlflow/", "wandb/"))


def _agreed(runs: Sequence[Run], given: Mapping[str, object]) -> ReportOptions:
    """The options for comparing runs. Raise RayflError for a given option that fits none of them."""
    require(runs, agreed_options([], given))
    return agreed_options([run.experiment for run in runs], given)


def print_comparison(runs: Sequence[Run], options: ReportOptions) -> None:
    """Print runs side by side, the best first."""
    for table in comparison_tables(runs, options):
        print_table(table, 140)
