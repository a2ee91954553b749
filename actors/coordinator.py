"""Coordinator: the Ray actor that plays an experiment. It owns the client actors, every state and the run directory.

If objects are lost with a node, it plays again from the last checkpoint. If the coordinator itself dies, the driver
starts another one, which resumes the run directory (actors/driver.py).
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from logging.handlers import QueueHandler
from queue import SimpleQueue
from threading import Condition
from typing import TypeAlias

import ray
from ray.exceptions import ObjectLostError

from actors.errors import Failure, LostObjects, Setbacks, try_again
from actors.placement import Machines, Placement
from actors.ray_executor import RayExecutor
from rayfl.determinism.platform import ON_CPU, Platform, differences, of_driver, with_driver, with_kind
from rayfl.determinism.process import hide_gpus, prepare_process, trim
from rayfl.errors import log, refusing_exits
from rayfl.own_packages import OwnPackages
from rayfl.rounds.executor import Wave
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.setup import Setup
from rayfl.run_directory.description import PLATFORM, Description, read_platform
from rayfl.run_directory.disk import write_json, writing
from rayfl.run_directory.play_run import Listener, RunOutput, Stopped, play_run

_CONTROL = "control"
"""The concurrency group of the methods that answer during a run."""


@dataclass(frozen=True)
class RunSpec:
    """A coordinator's task: play an experiment into a run directory, or continue a run there.

    `description` is written when the actors are ready, because nothing in a run directory may change before the actors
    are known to compute the same bits; None: the directory has one. It is large, and so lies in the object store, which
    holds no keys of accounts.
    """

    placement: Placement
    output: RunOutput
    description: Description | None = None


News: TypeAlias = tuple[RoundRow, Mapping[str, float]] | logging.LogRecord


@dataclass(frozen=True)
class Progress:
    """The news of a run, in their order, whether the run is over, and the progress of its round."""

    news: Sequence[News]
    over: bool
    wave: Wave | None = None


# Ray's type stubs know no concurrency groups.
@ray.remote(num_cpus=0, concurrency_groups={_CONTROL: 4})  # pyright: ignore[reportCallIssue]
class Coordinator(OwnPackages):
    """Plays one experiment. `run` returns when the run is over; the other methods answer meanwhile."""

    def __init__(self) -> None:
        prepare_process()
        hide_gpus()
        self._changed = Condition()
        self._news: list[News] = []
        self._reached = -1
        self._stopping = self._over = self._trims = False
        self._wave: Wave | None = None
        # The driver has the user's handlers and level, so it logs. Nothing goes to stderr here, because Ray may show
        # that to the driver too.
        handler = QueueHandler(SimpleQueue())
        # A QueueHandler makes records that pickle; they are news instead of entries of its queue.
        handler.enqueue = lambda record: self._tell(record)
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        log.propagate = False

    def run(self, setup: Sequence[ray.ObjectRef], spec: RunSpec, environment: Mapping[str, str]) -> bool:
        """Play all rounds. False if `stop` ended the run before its last round.

        `setup` is a reference in a list, which Ray does not resolve: actors get it, too. `environment`: the driver's
        variables that trackers read, which a cluster's processes lack; keys of accounts may be in it. Errors are those
        of `RayExecutor` and of `rayfl.run_directory.play_run.play_run`.
        """
        os.environ.update(environment)
        try:
            machines = Machines(read_platform(spec.output.directory), spec.placement.mixed, spec.output.resume)
            times = count()
            executor = RayExecutor(
                setup[0],
                spec.placement,
                machines,
                lambda platform: _describe(spec, platform, first=next(times) == 0),
                self._keep_wave,
                lambda: self._stopping,
            )
            try:
                value: Setup = ray.get(setup[0])
                # States below 100 kB are in this process's heap, and the allocator keeps the memory of old ones. If
                # there are no states, a trim only makes the next round fetch its working memory anew (W3: +40 %).
                self._trims = value.stateful or value.has_server_memory
                with refusing_exits():
                    self._play_despite_losses(value, executor, spec)
            finally:
                executor.close()
        except Stopped:
            return False
        finally:
            self._over = True
            self._tell()
        return True

    def _play_despite_losses(self, setup: Setup, executor: RayExecutor, spec: RunSpec) -> None:
        """Play; if objects are lost with a node, play again from the last checkpoint."""
        output = spec.output
        setbacks = Setbacks()
        listener = Listener(self._record, stopping=lambda: self._stopping, hurrying=lambda: executor.pool.leaving.own)
        while True:
            try:
                play_run(setup, executor, output, listener)
                return
            except (LostObjects, ObjectLostError) as error:
                output = replace(output, resumed=True)
                # The end of a node that was announced does not count.
                times = setbacks.add(self._reached) - len(executor.pool.leaving.announced)
                try_again(Failure("objects", max(0, times), str(error)))

    @ray.method(concurrency_group=_CONTROL)
    def progress(self, known: int, timeout_s: float) -> Progress:
        """Return the news after the first `known` ones; wait for at most `timeout_s` until there are some."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._news) > known, timeout_s)
            return Progress(self._news[known:], self._over, self._wave)

    @ray.method(concurrency_group=_CONTROL)
    def stop(self) -> None:
        """End the run after the current round."""
        self._stopping = True

    def _keep_wave(self, wave: Wave) -> None:
        """Keep the progress of the round for the next call of `progress`, which is not woken for it."""
        self._wave = wave

    def _record(self, row: RoundRow, means: Mapping[str, float]) -> None:
        self._reached = row.round
        self._wave = None
        self._tell((row, means))
        if self._trims:
            trim()

    def _tell(self, *news: News) -> None:
        """Wake the call of `progress` that waits for news."""
        with self._changed:
            self._news += news
            self._changed.notify_all()


def _describe(spec: RunSpec, platform: Platform, first: bool) -> None:
    """Write the actors' platform into the run directory; if `first`, also the rest of the description.

    Raise DiskError if they cannot be written.
    """
    description = spec.description
    machines = platform
    driver = description.platform if description else {}
    if driver:
        if spec.output.resumed and differences(of_driver(platform), driver, ON_CPU):
            # The run is mixed, or `require_same_platform` would have refused to continue it.
            machines = with_kind(machines, {**machines, **{key: driver[key] for key in ON_CPU}})
        machines = with_driver(machines, driver)
    with writing(spec.output.directory, f"go on with: {spec.output.resume}"):
        if first and description is not None:
            description.write(spec.output.directory, machines)
        else:
            write_json(spec.output.directory / PLATFORM, machines)
