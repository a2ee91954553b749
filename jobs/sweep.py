"""Run all combinations of a sweep and compare them on one page.

By default the runs follow one another in this process, on one Ray session. With --parallel, each run is a process of
its own, so that one that dies does not harm the others: the command `rayfl run --resume`, a Ray job of its own on that
session. `rayfl ls` shows the rounds of the runs.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from signal import SIGINT
from typing import Literal

from actors import supervision
from jobs.console import Audience
from jobs.display import Overall, say
from jobs.failures import FAILED, INTERRUPTED, LIMIT, sentence_and_code
from jobs.reporting import print_comparison
from jobs.resuming import earlier_run, require_same_platform
from jobs.single import DRAWING, draw, go_on, run
from rayfl import toml
from rayfl.data.loading import keeping_datasets
from rayfl.determinism import platform
from rayfl.errors import RayflError, log, one_line
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import require_settings
from rayfl.experiment.prepare import prepare
from rayfl.experiment.sweep import Combination
from rayfl.experiment.table import absolute
from rayfl.report.pivot import check_tables
from rayfl.run_directory.disk import write_json
from rayfl.run_directory.object_storage import Storage
from rayfl.run_directory.record import ORDER, Refused, Run, read_order, read_run
from rayfl.run_directory.run_files import REPORT, require_replaceable
from rayfl.run_directory.run_folder import RunFolder, require_free
from rayfl.settings import Settings, shown

PAGE = "comparison.html"
"""The page in a sweep's directory."""

Status = Literal["waiting", "finished", "skipped", "stopped", "failed", "refused"]


@dataclass(frozen=True)
class Outcome:
    """How the run of a combination ended, or that it waits for its turn.

    error: the sentence of a failed or refused run. most_actors: how many actors a waiting run can use.
    """

    combination: Combination
    directory: Path
    status: Status
    error: str = ""
    most_actors: int = 0


@dataclass(frozen=True)
class Swept:
    """The result of a sweep: its directory, and the outcomes of its combinations in their order; of a stopped sweep
    without those that were not begun."""

    directory: Path
    outcomes: Sequence[Outcome]

    def with_status(self, *statuses: Status) -> list[Outcome]:
        """The outcomes whose status is one of these."""
        return [outcome for outcome in self.outcomes if outcome.status in statuses]


def sweep(
    combinations: Sequence[Combination],
    directory: Path | None,
    parallel: int,
    overwrite: bool,
    audience: Audience,
    again: str | None = None,
) -> int:
    """Run all combinations into `directory` (None: the next free one) and print the outcome; returns the exit code.

    again: how to go on after a stop, in words. 0: all finished; 1: some failed; 75: runtime.limit_s ended the sweep;
    130: a signal did. RayflError as `run_all`.
    """
    swept = run_all(combinations, directory, parallel, overwrite, audience, again)
    audience.display.close()
    finished = swept.with_status("finished", "skipped")
    for outcome in swept.outcomes:
        say(f"{outcome.combination.title}: {outcome.status}")
    if finished:
        print_comparison([read_run(outcome.directory) for outcome in finished], combinations[0].experiment.report)
        say(f"comparison:      {swept.directory / PAGE}")
    say(f"sweep directory: {swept.directory}")
    failed = swept.with_status("failed")
    refused = swept.with_status("refused")
    for outcome in (*refused, *failed):
        say(one_line(f"rayfl: {outcome.combination.title}: {outcome.error}"), sys.stderr)
    if len(finished) + len(failed) + len(refused) < len(combinations):
        stopped, code = audience.stopped(
            min(combination.experiment.runtime.limit_s or inf for combination in combinations)
        )
        again = again or f"go on with --dir {swept.directory}"
        say(f"{stopped} with {len(finished)} of {len(combinations)} runs finished; {again}")
        return code
    return FAILED if failed else 0


def run_all(
    combinations: Sequence[Combination],
    directory: Path | None,
    parallel: int,
    overwrite: bool,
    audience: Audience,
    again: str | None = None,
) -> Swept:
    """Run all combinations into `directory` (None: the next free one), and compare the finished runs on a page.

    `audience` follows the runs in this process. Raise RayflError, before anything is written, if a
    combination cannot run, or if its directory holds another experiment and `overwrite` is false.
    """
    if type(parallel) is not int or parallel < 1:
        raise RayflError(f"--parallel {shown(parallel)} is not allowed; it must be a whole number of at least 1")
    first = combinations[0].experiment
    folder = RunFolder.at(directory, first.output.directory, first.name)
    folder = folder if directory else folder.next_free()
    directory = folder.directory
    url = folder.url
    supervision.tell_parent(again=again or f"go on with --dir {directory}")
    if url is not None:
        combinations = [
            _changed(combination, "output", combination.experiment.output.model_copy(update={"directory": url}))
            for combination in combinations
        ]
    audience.display.stage(f"checking {len(combinations)} experiments")
    if directory.exists() and (not directory.is_dir() or (directory / "experiment.json").exists()):
        raise RayflError(f"{directory} is a file or a run, no directory of a sweep; name another one")
    require_replaceable(directory / PAGE, REPORT, overwrite)
    settings = [combination.experiment.as_dict() for combination in combinations]
    require_settings(settings, first.report.best_over)
    check_tables(first.report.tables, settings)
    swept = Swept(directory, _play(combinations, directory, parallel, overwrite, audience))
    if finished := [outcome.directory for outcome in swept.with_status("finished", "skipped")]:
        audience.display.stage(DRAWING)
        page = draw(directory, finished, PAGE, first.report, overwrite)
        if url is not None:
            try:
                Storage(url).put(PAGE, page)
            except OSError as error:
                log.warning("%s cannot be written to (%s): the page is only in %s", url, error, page)
    return swept


def _play(
    combinations: Sequence[Combination], directory: Path, parallel: int, overwrite: bool, audience: Audience
) -> list[Outcome]:
    """Check all combinations, and run those that have not finished.

    Raise RayflError if one cannot run and its `[report]` does not list it, or if none can.
    """
    with ExitStack() as opened:
        # A mistake of the data is reported with the first experiment that has it.
        with suppress(ValueError):
            opened.enter_context(keeping_datasets([combinations[0].experiment.data]))
        planned = [_planned(combination, directory, parallel, overwrite) for combination in combinations]
        if all(outcome.status == "refused" for outcome in planned):
            raise RayflError(f"all combinations are refused, the first one because: {planned[0].error}")
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / ORDER, _order(planned, read_order(directory)))
        waiting = [outcome for outcome in planned if outcome.status == "waiting"]
        if not waiting:
            return planned
        address = opened.enter_context(one_session([outcome.combination.experiment for outcome in waiting], audience))
        parallel = min(parallel, len(waiting))
        waiting = [_sharing(outcome, parallel) for outcome in waiting]
        overall = Overall(audience.display, len(waiting))
        ended = (
            _one_by_one(waiting, overwrite, audience, overall)
            if parallel == 1
            else run_at_once(waiting, parallel, overwrite, address, overall, audience)
        )
        outcomes = {outcome.directory: outcome for outcome in (*planned, *ended)}
    return [outcome for outcome in outcomes.values() if outcome.status != "waiting"]


def _planned(combination: Combination, home: Path, parallel: int, overwrite: bool) -> Outcome:
    """What becomes of a combination in the sweep's directory: refused, skipped as finished, or waiting.

    Raise RayflError if it cannot run there.
    """
    directory = home / combination.directory
    try:
        # Some compressors report only here, as they make their memory, that they cannot encode this model.
        setup = prepare(combination.experiment)
        setup.uplink.init(setup.initial)
    except ValueError as error:
        if not combination.experiment.report.list_refused:
            raise RayflError(f"{combination.title}: {error}") from None
        return Outcome(combination, directory, "refused", str(error))
    try:
        run = None if overwrite else earlier_run(directory, combination.experiment)
        if run is None:
            require_free(directory, overwrite)
        elif not run.finished:
            runtime = combination.experiment.runtime
            require_same_platform(run, runtime, platform.describe(runtime.threads, runtime.driver_device))
    except ValueError as error:
        raise RayflError(f"{combination.title}: {error}") from None
    if (unnamed := combination.experiment.in_memory) and (parallel > 1 or run is not None):
        why = (
            "no other process can run it: put it into a file or a module, or run one at a time"
            if parallel > 1
            else f"rayfl cannot check that the run in {directory} used the same: name another directory, or give "
            "--overwrite"
        )
        raise RayflError(f"{combination.title}: {unnamed[0]} was given from Python and cannot be imported, so {why}")
    is_finished = run is not None and run.finished
    return Outcome(combination, directory, "skipped" if is_finished else "waiting", most_actors=setup.most_actors)


def _order(planned: Sequence[Outcome], before: Sequence[str]) -> dict[str, list[object]]:
    """The content of ORDER: the names of runs, with those that were there `before`, and what was refused, once for all
    seeds."""
    names = [outcome.directory.name for outcome in planned if outcome.status != "refused"]
    by_label: dict[str, object] = {}
    for outcome in planned:
        if outcome.status == "refused":
            experiment = outcome.combination.experiment
            refused = Refused(experiment.label or "", experiment.swept, outcome.error)
            by_label.setdefault(refused.label, refused._asdict())
    return {"runs": [*dict.fromkeys([*names, *before])], "refused": [*by_label.values()]}


def _changed(combination: Combination, table: str, settings: Settings) -> Combination:
    """The combination with another table of its experiment."""
    return replace(combination, experiment=combination.experiment.model_copy(update={table: settings}))


@contextmanager
def one_session(experiments: Sequence[Experiment], audience: Audience) -> Iterator[str | None]:
    """One Ray for all runs, if any of them uses Ray; yields its address, or None."""
    runtimes = [experiment.runtime for experiment in experiments if experiment.runtime.executor == "ray"]
    for key in ("address", "object_store_memory_mb"):
        if len({getattr(runtime, key) for runtime in runtimes}) > 1:
            raise RayflError(f"runtime.{key} cannot be swept, because all runs share one Ray; give it one value")
    if not runtimes:
        yield None
        return
    from actors import session

    audience.display.stage(session.opening(runtimes[0]))
    with session.session(runtimes[0]):
        yield session.address()


def _sharing(outcome: Outcome, parallel: int) -> Outcome:
    """A waiting run with its share of the cluster. Raise RayflError if the share is too small for its actors."""
    runtime = outcome.combination.experiment.runtime
    if runtime.executor == "inline":
        return outcome
    from actors.placement import share

    shared = share(runtime, parallel, outcome.most_actors)
    return replace(outcome, combination=_changed(outcome.combination, "runtime", shared))


def _one_by_one(waiting: Sequence[Outcome], overwrite: bool, audience: Audience, overall: Overall) -> Iterator[Outcome]:
    """Run one combination after another. A signal ends the current one, and no later one is begun."""
    with supervision.stoppable(overall.stopping) as stopping:
        for number, outcome in enumerate(waiting):
            if not audience.display.hidden:
                say(f"[{number + 1}/{len(waiting)}] {outcome.combination.title}")
            ended = attempt(outcome.combination, outcome.directory, overwrite, audience)
            overall.over()
            yield ended
            # A signal during the last round, or the limit, leaves the run finished.
            limit_s = outcome.combination.experiment.runtime.limit_s
            if ended.status == "stopped" or stopping() or audience.is_over(limit_s):
                return


def attempt(combination: Combination, directory: Path, overwrite: bool, audience: Audience) -> Outcome:
    """Run one combination, or go on with its unfinished run. An error becomes its outcome and stops no other run."""
    try:
        finished = played(combination, directory, overwrite, audience).finished
    except Exception as error:  # noqa: BLE001 (one run's error must not end the others)
        return Outcome(combination, directory, "failed", sentence_and_code(error)[0])
    return Outcome(combination, directory, "finished" if finished else "stopped")


def played(combination: Combination, directory: Path, overwrite: bool, audience: Audience) -> Run:
    """Run one combination, or go on with its unfinished run; returns what it recorded."""
    try:
        before = None if overwrite else earlier_run(directory, combination.experiment)
        if before is not None:
            go_on(before, combination.experiment, audience)
        else:
            run(combination.experiment, directory, overwrite, audience)
        return read_run(directory)
    finally:
        # A stopped sweep is resumed by its own command, not by `rayfl resume RUN`.
        supervision.tell_parent(run=None)


def run_at_once(
    waiting: Sequence[Outcome],
    parallel: int,
    overwrite: bool,
    address: str | None,
    overall: Overall,
    audience: Audience,
) -> list[Outcome]:
    """Run up to `parallel` combinations at once, in processes that join the Ray at `address` (None: without Ray).

    The first signal lets each run end its round, and no further one begins; the second ends all at once.
    """
    running: list[subprocess.Popen[str]] = []

    def stop() -> None:
        overall.stopping()
        for process in running:
            process.send_signal(SIGINT)

    def in_process(outcome: Outcome) -> Outcome:
        """One run from start to end; still waiting if it was not begun."""
        experiment = outcome.combination.experiment
        if stopping() or audience.is_over(experiment.runtime.limit_s):
            return outcome
        with tempfile.TemporaryDirectory() as folder:
            # The limit counts from the start of the sweep.
            left_s = audience.began + (experiment.runtime.limit_s or inf) - time.monotonic()
            process = _begun(outcome, Path(folder, "experiment.toml"), overwrite, left_s, address)
            running.append(process)
            # The signal may have come meanwhile.
            if stopping():
                process.send_signal(SIGINT)
            status, error = _end(process, outcome.combination.title)
        # A signal ends a process that is still starting at once, with another exit code.
        status = "stopped" if stopping() and status == "failed" else status
        overall.over()
        say(f"{outcome.combination.title}: {status}")
        return replace(outcome, status=status, error=error)

    with ThreadPoolExecutor(parallel) as pool, supervision.stoppable(stop) as stopping:
        try:
            return [*pool.map(in_process, waiting)]
        except KeyboardInterrupt:
            for process in running:
                process.kill()
            raise


def _begun(outcome: Outcome, file: Path, overwrite: bool, left_s: float, address: str | None) -> subprocess.Popen[str]:
    """The process that runs an experiment, which is written to `file`, or continues its unfinished run."""
    file.write_text(toml.dumps(absolute(outcome.combination.experiment.as_dict())), encoding="utf-8")
    command = [sys.executable, "-m", "rayfl", "run", str(file), "--output", str(outcome.directory)]
    limit = [f"runtime.limit_s={max(1.0, left_s):.0f}"] if left_s < inf else []
    return subprocess.Popen(
        [*command, "--overwrite" if overwrite else "--resume", *limit],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **({"RAY_ADDRESS": address} if address else {})},
        # A session of its own, so that a terminal's Ctrl-C reaches it once, from `stop`.
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )


def _end(process: subprocess.Popen[str], title: str) -> tuple[Status, str]:
    """Wait for the end of a process, printing for what it waits. Status, and rayfl's last sentence or the last line."""
    words = ""
    with process:
        for line in process.stdout or ():
            if "waiting for " in line:
                say(f"{title}: {line.rstrip()}")
            if line.startswith("rayfl: ") or not words.startswith("rayfl: "):
                words = line.strip() or words
    code = process.returncode
    if code in (0, INTERRUPTED, LIMIT):
        return "stopped" if code else "finished", ""
    return "failed", words.removeprefix("rayfl: ") or f"its process ended with code {code}"
