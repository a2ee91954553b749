"""Run all combinations of a sweep, one after another or several at once, and compare them on one page.

One after another: in this process, on one Ray session. Several at once: each in a process of its own, which is a job of
its own on that session, so that a run that dies does not harm the others; they share Ray's resources.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from logging import getLogger
from pathlib import Path
from signal import SIGINT
from typing import Literal

from actors import package_folder, session, supervisor
from actors.errors import ClusterError
from jobs import console
from jobs.console import Audience
from jobs.display import Display
from jobs.errors import described, one_line
from jobs.exit_codes import FAILED, INTERRUPTED
from jobs.overall import Overall
from jobs.places import copy_of
from jobs.single import DRAWING, describe_again, earlier_run, free_directory, go_on, run, warn_of_package
from rayfl.errors import RayflError
from rayfl.experiment import toml
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import require_settings
from rayfl.experiment.input_files import absolute
from rayfl.experiment.prepare import prepare
from rayfl.experiment.report_options import ReportOptions
from rayfl.experiment.sweep import Combination
from rayfl.report.scores import accuracy_names
from rayfl.report.series import groups
from rayfl.report.summary import summary
from rayfl.rounds.errors import ClientError
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.atomic_files import writing
from rayfl.run_directory.object_storage import Storage
from rayfl.run_directory.output_files import REPORT, require_replaceable
from rayfl.run_directory.record import Run, read_run, require_free

log = getLogger("rayfl")

PAGE = "comparison.html"
"""The page in a sweep's directory."""
Status = Literal["finished", "skipped", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of one combination; `error` is the sentence of a failed one."""

    combination: Combination
    directory: Path
    status: Status
    error: str = ""


@dataclass(frozen=True)
class Swept:
    """What became of a sweep: its directory, its combinations in their order, the page that compares what finished."""

    directory: Path
    outcomes: Sequence[Outcome]
    page: Path | None

    def with_status(self, *statuses: Status) -> list[Outcome]:
        """The outcomes with one of these."""
        return [outcome for outcome in self.outcomes if outcome.status in statuses]


def sweep(
    combinations: Sequence[Combination],
    directory: Path | None = None,
    parallel: int = 1,
    overwrite: bool = False,
    display: Display | None = None,
) -> int:
    """Run all combinations into `directory` (None: the next free one) and print the outcome; returns the exit code.

    0: all finished; 1: some failed; 130: a signal ended the sweep. RayflError as of `run_all`.
    """
    swept = run_all(combinations, directory, parallel, overwrite, Audience(display=display))
    if display is not None:
        display.close()
    finished = swept.with_status("finished", "skipped")
    runs = [read_run(outcome.directory) for outcome in finished]
    numbers = {run.directory: summary(run) for run in runs}
    rows = [(one.combination.title, one.status, numbers.get(one.directory)) for one in swept.outcomes]
    names = accuracy_names(groups(runs), combinations[0].experiment.report.metric) if runs else []
    console.sweep_result(combinations[0].experiment.name, rows, swept.directory, swept.page, names)
    if sentence := package_folder.warning(swept.directory):
        print(sentence)
    failed = swept.with_status("failed")
    for outcome in failed:
        print(one_line(f"rayfl: {outcome.combination.title} failed: {outcome.error}"), file=sys.stderr)
    if len(finished) + len(failed) < len(combinations):
        print(f"stopped with {len(finished)} of {len(combinations)} runs finished; go on with --dir {swept.directory}")
        return INTERRUPTED
    return FAILED if failed else 0


def run_all(
    combinations: Sequence[Combination],
    directory: Path | None = None,
    parallel: int = 1,
    overwrite: bool = False,
    audience: Audience | None = None,
) -> Swept:
    """Run all combinations into `directory` (None: the next free one), and compare what finished on a page.

    `audience` follows each run that is not a process of its own. RayflError, before anything is written, where a
    combination cannot run, or where another experiment lies, finished or not, unless `overwrite` is given.
    """
    if parallel < 1:
        raise RayflError(f"--parallel {parallel} is not allowed; it must be a whole number of at least 1")
    audience = audience or Audience()
    directory = (directory or free_directory(combinations[0].experiment)).absolute()
    warn_of_package(directory, combinations[0].experiment)
    url = copy_of(directory, combinations[0].experiment.output.directory)
    combinations = [_of_sweep(one, directory.name, url) for one in combinations]
    audience.stage(f"checking {len(combinations)} experiments")
    waiting, outcomes, most_calls = _validated(combinations, directory, parallel, overwrite)
    if waiting:
        with _session([one.experiment for one in waiting], audience) as on_ray:
            parallel = min(parallel, len(waiting))
            waiting = [_sharing(one, parallel, most_calls[one.directory]) for one in waiting]
            outcomes += _run_waiting(waiting, directory, parallel, on_ray, overwrite, audience)
    place = {one.directory: number for number, one in enumerate(combinations)}
    outcomes.sort(key=lambda outcome: place[outcome.combination.directory])
    finished = [outcome.directory for outcome in outcomes if outcome.status in ("finished", "skipped")]
    options = combinations[0].experiment.report
    audience.stage(DRAWING)
    page = _page(finished, directory, options, overwrite) if finished else None
    if page is not None and url is not None:
        _copy_page(page, url)
    return Swept(directory, outcomes, page)


def _of_sweep(one: Combination, name: str, url: str | None) -> Combination:
    """The combination as one of the sweep in the directory `name`, unless its file puts it into another group, and with
    the folder at `url` for the copy of its run."""
    output = one.experiment.output
    changed = {"group": output.group or name} | ({} if url is None else {"directory": url})
    output = output.model_copy(update=changed)
    return replace(one, experiment=one.experiment.model_copy(update={"output": output}))


def _page(finished: Sequence[Path], directory: Path, options: ReportOptions, overwrite: bool) -> Path:
    from rayfl.report.page import report

    with writing(directory, f"draw the page with: rayfl report {directory}"):
        return report(finished, directory / PAGE, options, overwrite)


def _copy_page(page: Path, url: str) -> None:
    try:
        Storage(url).put(PAGE, page)
    except OSError as error:
        log.warning("%s cannot be written to (%s): the page is in %s alone", url, error, page)


def _validated(
    combinations: Sequence[Combination], directory: Path, parallel: int, overwrite: bool
) -> tuple[list[Combination], list[Outcome], dict[str, int]]:
    """The combinations to run, the outcomes of those that finished before, and how many actors each can use, by its
    directory."""
    if directory.exists() and (not directory.is_dir() or (directory / "experiment.json").exists()):
        raise RayflError(f"{directory} is no directory of a sweep; name another one")
    require_replaceable(directory / PAGE, REPORT, overwrite)
    require_settings([one.experiment.as_dict() for one in combinations], combinations[0].experiment.report.best_over)
    waiting, skipped, most_calls = [], [], {}
    for one in combinations:
        try:
            # Also compressors that cannot carry this model: they say so as they make their memory.
            setup = prepare(one.experiment)
            setup.uplink.init(setup.initial)
            most_calls[one.directory] = setup.most_calls
            place = directory / one.directory
            found = None if overwrite else earlier_run(place, one.experiment)
            if found is None:
                require_free(place, overwrite)
            _require_names(one.experiment, found, parallel)
        except ValueError as error:
            raise RayflError(f"{one.title}: {error}") from None
        if found is not None and found.finished:
            skipped.append(Outcome(one, directory / one.directory, "skipped"))
        else:
            waiting.append(one)
    return waiting, skipped, most_calls


def _require_names(experiment: Experiment, found: Run | None, parallel: int) -> None:
    """RayflError where something from Python that has no name would have to be known by it."""
    for what in experiment.in_memory:
        if parallel > 1:
            raise RayflError(
                f"{what} was given from Python and cannot be imported, so no other process can run it: put it into a "
                "file or a module, or run one at a time"
            )
        if found is not None:
            raise RayflError(
                f"{what} was given from Python and cannot be imported, so nobody can tell whether the run in "
                f"{found.directory} is of the same: name another directory, or overwrite it"
            )


@contextmanager
def _session(experiments: Sequence[Experiment], audience: Audience) -> Iterator[bool]:
    """One Ray for all runs, if any of them uses Ray; yields whether one does."""
    runtimes = [one.runtime for one in experiments if one.runtime.executor == "ray"]
    for key in ("address", "object_store_memory_mb"):
        if len({getattr(runtime, key) for runtime in runtimes}) > 1:
            raise RayflError(f"runtime.{key} cannot be swept, because all runs share one Ray; give it one value")
    if runtimes:
        audience.stage(session.opening(runtimes[0]))
    with session.session(runtimes[0]) if runtimes else nullcontext():
        yield bool(runtimes)


def _run_waiting(
    waiting: Sequence[Combination],
    directory: Path,
    parallel: int,
    on_ray: bool,
    overwrite: bool,
    audience: Audience,
) -> list[Outcome]:
    overall = Overall(audience.display, len(waiting))
    if parallel == 1:
        return list(_one_by_one(waiting, directory, overwrite, audience, overall))
    address = session.address() if on_ray else None
    return _Processes(directory, address, overwrite, overall).run(waiting, parallel)


def _sharing(one: Combination, parallel: int, most_calls: int) -> Combination:
    """The combination with its share of the cluster. RayflError if that is too small for its actors."""
    runtime = one.experiment.runtime
    if runtime.executor == "inline":
        return one
    try:
        runtime = session.shared(runtime, parallel, most_calls)
    except ValueError as error:
        raise RayflError(f"{one.title}: {error}") from None
    return replace(one, experiment=one.experiment.model_copy(update={"runtime": runtime}))


def _one_by_one(
    waiting: Sequence[Combination], directory: Path, overwrite: bool, audience: Audience, overall: Overall
) -> Iterator[Outcome]:
    """Run one combination after another. A signal ends the one under way, and no later one is begun."""
    with session.stoppable(overall.stopping) as stopping:
        for number, one in enumerate(waiting):
            if audience.show == "all":
                print(f"[{number + 1}/{len(waiting)}] {one.title}", flush=True)

            def on_round(row: RoundRow, means: Mapping[str, float], one: Combination = one) -> None:
                overall.part(one.title, (row.round + 1) / one.experiment.rounds)
                audience.on_round(row, means)

            outcome = _attempt(one, directory / one.directory, overwrite, replace(audience, on_round=on_round))
            overall.over(one.title)
            yield outcome
            # A signal may come too late to keep the run from its last round.
            if outcome.status == "stopped" or stopping():
                return


def _attempt(one: Combination, directory: Path, overwrite: bool, audience: Audience) -> Outcome:
    """Run one combination, or go on with its unfinished run. An error becomes its outcome and stops no other run."""
    try:
        before = None if overwrite else earlier_run(directory, one.experiment)
        if before is not None:
            go_on(before, one.experiment, audience)
        else:
            run(one.experiment, directory, overwrite, audience)
    except (ClientError, ClusterError, OSError) as error:
        return Outcome(one, directory, "failed", str(error))
    except Exception as error:  # noqa: BLE001 (a mistake of ours in one run must not cost the others)
        return Outcome(one, directory, "failed", described(error)[0])
    finally:
        # The sweep goes on by the command that began it.
        supervisor.report(run=None)
    return Outcome(one, directory, "finished" if read_run(directory).finished else "stopped")


@dataclass
class _Processes:
    """Runs combinations in processes of their own, which join the Ray at `address`."""

    directory: Path
    address: str | None
    overwrite: bool
    overall: Overall
    stopping: bool = False
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, waiting: Sequence[Combination], parallel: int) -> list[Outcome]:
        """Run up to `parallel` at once. The first signal lets runs end their round, the second ends them at once."""
        outcomes = []
        with (
            tempfile.TemporaryDirectory() as files,
            ThreadPoolExecutor(parallel) as pool,
            session.interruptible(self.stop),
        ):
            futures = [pool.submit(self._one, one, Path(files) / f"{n}.toml") for n, one in enumerate(waiting)]
            try:
                for future in as_completed(futures):
                    if (outcome := future.result()) is not None:
                        outcomes.append(outcome)
                        self.overall.over(outcome.combination.title)
                        print(f"[{len(outcomes)}/{len(waiting)}] {outcome.combination.title}: {outcome.status}")
            except KeyboardInterrupt:
                self._each(subprocess.Popen.kill)
                raise
        return outcomes

    def stop(self) -> None:
        """Begin no further run, and ask those under way to end."""
        self.overall.stopping()
        with self.lock:
            self.stopping = True
            self._each(lambda process: process.send_signal(SIGINT))

    def _each(self, act: Callable[[subprocess.Popen[str]], None]) -> None:
        for process in list(self.running.values()):
            act(process)

    def _one(self, one: Combination, file: Path) -> Outcome | None:
        """One run, from its start to its end; None if it was not begun."""
        directory = self.directory / one.directory
        try:
            command = self._command(directory, one.experiment, file)
        except (ValueError, OSError) as error:
            return Outcome(one, directory, "failed", str(error))
        with tempfile.TemporaryFile("w+") as errors:
            with self.lock:
                if self.stopping:
                    return None
                # A session of its own, so that a terminal's Ctrl-C comes to it once, from `stop`.
                process = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=self._environment(),
                    start_new_session=True,
                )
                self.running[one.directory] = process
            with process:
                assert process.stdout is not None
                self.overall.begin(one.title)
                for line in process.stdout:
                    if not (found := console.ROUND_LINE.match(line)):
                        continue
                    if self.overall.live:
                        self.overall.part(one.title, int(found[1]) / int(found[2]), line.strip())
                    else:
                        print(f"{one.title}  {line}", end="", flush=True)
            del self.running[one.directory]
            errors.seek(0)
            status, error = _end(process.returncode, errors.read())
            # A signal that finds a process still starting ends it at once, in an exit code of its own.
            return Outcome(one, directory, "stopped" if self.stopping and status == "failed" else status, error)

    def _command(self, directory: Path, experiment: Experiment, file: Path) -> list[str]:
        """The command that runs an experiment, which is written to `file`, or goes on with its unfinished run."""
        before = None if self.overwrite else earlier_run(directory, experiment)
        if before is not None:
            describe_again(before, experiment)
            return [sys.executable, "-m", "rayfl", "resume", str(directory)]
        file.write_text(toml.dumps(absolute(experiment.as_dict())), encoding="utf-8")
        command = [sys.executable, "-m", "rayfl", "run", str(file), "--output", str(directory)]
        return command + ["--overwrite"] * self.overwrite

    def _environment(self) -> dict[str, str]:
        here = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": path} | ({"RAY_ADDRESS": self.address} if self.address else {})


def _end(code: int, errors: str) -> tuple[Status, str]:
    """Status and error from an exit code and stderr: the last sentence of ours there, or else the last line."""
    if code == 0:
        return "finished", ""
    if code == INTERRUPTED:
        return "stopped", ""
    lines = [line for line in errors.splitlines() if line.strip()]
    ours = [line.removeprefix("rayfl: ").removeprefix("the run failed: ") for line in lines if "rayfl: " in line[:7]]
    return "failed", (ours or lines or [f"its process ended with code {code}"])[-1]
