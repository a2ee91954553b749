"""`rayfl run --resume`, which may be repeated, and the printed result of a run."""

from pathlib import Path

from jobs.console import Audience
from jobs.earlier_run import earlier_run, fetch_newer
from jobs.looking import result_table
from jobs.single import finish_up, folder_of, go_on, run
from jobs.standard_output import print_table, say
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.report.summary import summary
from rayfl.run_directory.object_storage import is_url
from rayfl.run_directory.record import read_run
from rayfl.run_directory.run_folder import RunFolder
from rayfl.settings import dotted


def run_or_resume(experiment: Experiment, output: Path | str | None, audience: Audience) -> Path:
    """Begin an experiment's run in `output`, go on with it, or say that it is finished; returns its directory.

    `output`: a directory or a URL; None: NAME below the URL in the experiment's `output.directory`. The same call may
    be repeated after any end, even a kill. Raise RayflError if `output` holds something else than a run of these
    settings.
    """
    if output is None and not is_url(experiment.output.directory):
        raise RayflError("--resume needs the directory of the run: give it as --output DIRECTORY")
    folder, experiment = folder_of(experiment, output)
    if folder.url is not None:
        audience.display.stage(f"looking at {folder.url}")
        fetch_newer(folder)
    before = earlier_run(folder.directory, experiment, "name another --output")
    if before is None:
        return run(experiment, folder.directory, audience=audience)
    if not before.finished:
        return go_on(before, experiment, audience)
    finish_up(folder, experiment.output.report, audience)
    say(f"{folder.directory} is finished: nothing is left to run")
    return folder.directory


def print_result(directory: Path, audience: Audience) -> int:
    """Close the display and print the result of a run. Return the exit code: 0, or why the run ended before its end."""
    page = directory / "report.html"
    with audience.own(directory):
        records = read_run(directory)
    audience.display.close()
    print_table(result_table(summary(records)), 100)
    say(f"run directory: {directory.absolute()}")
    if page.exists():
        say(f"report:        {page}")
    settings = dotted(records.experiment)
    if url := RunFolder(directory, str(settings.get("output.directory", ""))).url:
        say(f"copy: {url}")
    if records.finished:
        return 0
    stopped, code = audience.stopped(settings.get("runtime.limit_s"))
    say(f"{stopped} after {len(records.rounds)} of {settings['rounds']} rounds; go on with: rayfl resume {directory}")
    return code
