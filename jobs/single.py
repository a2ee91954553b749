"""Run one experiment or resume a run, draw its page, and print its result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path

from actors import folders, fork_server, supervision
from jobs.console import Audience, following
from jobs.display import print_table, say
from jobs.reporting import result_table
from jobs.resuming import earlier_run, fetch_newer, require_same_platform, to_resume
from rayfl.determinism.platform import describe, with_kind
from rayfl.determinism.torch_flags import own_flags
from rayfl.errors import MethodError, RayflError, log, log_once, refusing_exits
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import described, identity
from rayfl.experiment.prepare import prepare
from rayfl.experiment.report_options import ReportOptions
from rayfl.report.summary import early_end, summary
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.setup import Setup
from rayfl.run_directory.description import Description
from rayfl.run_directory.disk import writing
from rayfl.run_directory.object_storage import is_url
from rayfl.run_directory.play_run import Listener, RunOutput, Stopped, play_run
from rayfl.run_directory.record import Run, read_records, read_run
from rayfl.run_directory.run_files import REPORT, require_no_links, require_replaceable
from rayfl.run_directory.run_folder import RunFolder
from rayfl.settings import dotted
from rayfl.tasks.supervised import with_task

Player = Callable[[RunOutput, Listener], object]
"""Plays the rounds of a prepared experiment."""
DRAWING = "drawing the page"


@dataclass
class Prepared:
    """An experiment that is ready to be played: its setup, and its description with the platform of this process."""

    experiment: Experiment
    setup: Setup
    description: Description

    @property
    def inline(self) -> bool:
        """Whether this process plays the rounds, without Ray."""
        return self.experiment.runtime.executor == "inline"

    def hand_over(self) -> Setup:
        """Return the setup, which is no longer here afterwards: its memory is the receiver's to free."""
        setup = self.setup
        del self.setup
        return setup


@refusing_exits()
@own_flags()
def run(
    experiment: Experiment, output: Path | str | None = None, overwrite: bool = False, audience: Audience | None = None
) -> Path:
    """Run an experiment into a run directory and return the directory.

    `output`: the run directory, or the URL of its copy (then the directory is runs/NAME); None: the next free directory
    of the experiment's name in `experiment.output.directory`.

    Raise RayflError if parts of the experiment do not fit each other, the cluster or the storage; then no directory
    remains. Raise DiskError if the directory or, at the end, its copy cannot be written.
    """
    audience = audience or Audience()
    folder, experiment = folder_of(experiment, output)
    if output is None:
        folder = folder.next_free()
    folder.require_writable_copy(may_hold_run=overwrite)
    return _play(_prepared(experiment, audience), folder, folder.made(overwrite, numbered=output is None), audience)


def folder_of(experiment: Experiment, output: Path | str | None = None) -> tuple[RunFolder, Experiment]:
    """Return the run's folder (`output` as in `run`), and the experiment whose `output.directory` is the copy's."""
    folder = RunFolder.at(output, experiment.output.directory, experiment.name)
    changed = experiment.output.model_copy(update={"directory": folder.output})
    return folder, experiment.model_copy(update={"output": changed})


def resume(location: Path | str, overrides: Sequence[str] = (), audience: Audience | None = None) -> Path:
    """Resume an interrupted run, or extend it to more rounds; returns its directory. `location`: a directory or a URL.

    If the run is finished, draw its page and complete its copy if they are missing. `overrides` may raise `rounds`, and
    change settings that do not change the numbers (runtime, output, checkpoint, report).

    Raise RayflError for other changes, if this machine computes other bits, unless runtime.mixed is set, and as
    `require_asked` for a run from another host.
    """
    return go_on(*to_resume(location, overrides), audience)


@refusing_exits()
@own_flags()
def go_on(before: Run, experiment: Experiment, audience: Audience | None = None) -> Path:
    """Resume a run with the settings in `experiment`. The settings that decide its numbers must be unchanged.

    If the run is finished, only draw its page and complete its copy. Raise RayflError, before anything is written, if
    the run cannot be resumed here, if nothing is left to do, or if the directory has links.
    """
    audience = audience or Audience()
    supervision.tell_parent(run=str(before.directory))
    require_no_links(before.directory)
    folder = RunFolder.at(before.directory, experiment.output.directory)
    ended = early_end(before)
    if before.finished and (ended or experiment.rounds == len(before.rounds)):
        if not finish_up(folder, experiment.output.report, audience):
            more = f"[stop] ended it: {ended}" if ended else f"to continue it, give --rounds above {experiment.rounds}"
            raise RayflError(f"{folder.directory} is finished; {more}")
        return folder.directory
    folder.require_writable_copy(may_hold_run=True)
    if experiment.output.report:
        require_replaceable(folder.directory / "report.html", REPORT)
    prepared = _prepared(experiment, audience)
    require_same_platform(before, experiment.runtime, prepared.description.platform)
    return _play(prepared, folder, nullcontext(folder), audience, before)


def _prepared(experiment: Experiment, audience: Audience) -> Prepared:
    audience.display.stage(f"{experiment.name}: reading the data and building the model")
    description = described(experiment)
    setup = prepare(experiment)
    table = with_task(description.table, setup.dataset)
    setup = replace(setup, identity=identity(experiment, table))
    here = describe(experiment.runtime.threads, experiment.runtime.driver_device)
    return Prepared(experiment, setup, replace(description, table=table, platform=here))


def _play(
    prepared: Prepared,
    folder: RunFolder,
    opening: AbstractContextManager[RunFolder],
    audience: Audience,
    before: Run | None = None,
) -> Path:
    """Play the rounds that are left in `folder`, draw the page and copy the run; returns the directory.

    `opening` makes the directory of a new run, and yields it; `before`: the run to continue.
    """
    experiment = prepared.experiment
    page = None
    with ExitStack() as copying, ThreadPoolExecutor(1) as drawing:
        with _player(prepared, folder, audience, resumed=before is not None) as play, opening as folder:
            supervision.tell_parent(run=str(folder.directory))
            output = RunOutput(
                folder.directory,
                experiment.output.save_models,
                experiment.output.track,
                experiment.checkpoint,
                resumed=before is not None,
            )
            recorded = {} if before is None else before.platform
            # On Ray, the coordinator adds the machines; only it writes the description of a resumed run.
            machines = with_kind(recorded, prepared.description.platform) if prepared.inline else None
            if before is None or prepared.inline:
                with writing(folder.directory, "run it again" if before is None else f"go on with: {output.resume}"):
                    prepared.description.write(folder.directory, machines, begins=before is None)
            try:
                _play_rounds(prepared, play, output, audience, copying.enter_context(folder.mirrored()))
            except MethodError as error:
                if not len(read_records(folder.directory, "rounds")):
                    raise
                kept = f"the rounds before it are kept, go on with: {output.resume}"
                raise MethodError(f"{error}; {kept}") from error
            supervision.tell_parent(played=str(folder.directory))
            if experiment.output.report:
                audience.display.stage(DRAWING)
                # Drawn while Ray shuts down.
                page = drawing.submit(draw, folder.directory)
        if page is not None:
            page.result()
    return folder.directory


@contextmanager
def _player(prepared: Prepared, folder: RunFolder, audience: Audience, resumed: bool) -> Iterator[Player]:
    """Context manager: what plays the experiment, on the Ray that this starts or joins, or in this process.

    `resumed`: whether there is a run in the folder. Raise errors before anything is written.
    """
    if folder.url is None and (sentence := folders.warning_of_deletion(folder.directory.parent)):
        log_once(WARNING, sentence)
    if prepared.inline:
        fork_server.end()
        yield partial(_play_here, prepared.hand_over)
        return
    from actors import session
    from actors.driver import play_on_ray
    from actors.placement import place

    runtime = prepared.experiment.runtime
    audience.display.stage(f"{prepared.experiment.name}: {session.opening(runtime)}")
    with session.session(runtime, f"rayfl resume {folder.directory}" if resumed else None):
        placement = place(runtime, most_calls=prepared.setup.most_actors)
        yield partial(play_on_ray, prepared.hand_over, placement, prepared.description)


def _play_here(hand_over: Callable[[], Setup], output: RunOutput, listener: Listener) -> None:
    """Play a run in this process. It ends after its round at the first signal, as on Ray."""
    setup = hand_over()
    with supervision.stoppable(listener.on_stop) as has_signal, suppress(Stopped):
        watching = replace(listener, stopping=lambda: has_signal() or listener.stopping())
        play_run(setup, InlineExecutor(setup, listener.on_wave), output, watching)


def _play_rounds(
    prepared: Prepared, play: Player, output: RunOutput, audience: Audience, round_done: Callable[[], object]
) -> None:
    """Play all rounds that are left. `round_done` is called after each round."""
    experiment = prepared.experiment
    title = experiment.label or experiment.name
    with following(experiment.rounds, title, audience, prepared.setup.metric_facts) as show:
        for lost in experiment.in_memory:
            log.warning(f"{lost} was given from Python and cannot be imported: this run cannot be resumed")
        dataset = prepared.setup.dataset
        for line in dataset.in_words(10):
            log_once(INFO, f"{dataset.train.place or dataset.name}: {line}")

        def on_round(row: RoundRow, means: Mapping[str, float]) -> None:
            round_done()
            show(row, means)
            audience.on_round(row, means)

        def stopping() -> bool:
            return audience.stopping() or audience.is_over(experiment.runtime.limit_s)

        play(output, Listener(on_round, show.wave, show.stopping, stopping))


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
