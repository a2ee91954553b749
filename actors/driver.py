"""A run from the driver's side: start a coordinator, follow it to the end, and start another one if it dies.

The signatures of public functions here have no types of Ray, so that jobs need not import Ray.
"""

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.client import Actor
from actors.coordinator import Coordinator, News, Progress, RunSpec
from actors.errors import ClusterError, Failure, Setbacks, try_again, unwrapped
from actors.placement import Placement
from actors.supervision import stoppable
from rayfl.determinism.process import trim
from rayfl.errors import ClientError, error_text, log, out_of_memory
from rayfl.rounds.setup import Setup
from rayfl.run_directory.description import Description
from rayfl.run_directory.play_run import Listener, RunOutput
from rayfl.run_directory.trackers.tracker import environment

POLL_S = 1.0
"""Seconds between looks for a signal during a round. The end of a round is reported at once."""


def play_on_ray(
    hand_over: Callable[[], Setup],
    placement: Placement,
    description: Description | None,
    output: RunOutput,
    listener: Listener,
) -> bool:
    """Play a run on the Ray that this process uses.

    Return True if all rounds were played, False if a signal ended the run. `hand_over` returns the setup, which the
    caller should not keep: the object store has it then, and this process frees the memory of the setup, the data and
    their partition. `description` is written into the run directory with the actors' platform. Losses are logged. The
    first SIGINT or SIGTERM ends the run after the current round, the second one at once; it can be resumed either way.
    Raise ClientError if a client's code fails; ClusterError if Ray does.
    """
    for sentence in placement.notices:
        log.warning(sentence)
    spec = RunSpec(placement, replace(output, directory=output.directory.absolute()), description)
    variables = environment(output.trackers)
    reference = ray.put(hand_over())
    # From here on this process only follows the run.
    trim()
    following = _Following(listener)
    try:
        with stoppable(following.stop):
            return following.play(reference, spec, variables)
    finally:
        # The error of a dead coordinator is in a cycle with its traceback, whose frames hold references. Ray ends this
        # process if another thread frees one while Ray shuts down, such as the thread that draws the run's page.
        gc.collect()


class _Following:
    """A run that the driver follows: its coordinator, the last round that was reported, whether it is to stop."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.coordinator: Actor | None = None
        self.reached = -1
        self.asked = False

    def stop(self) -> None:
        """Let the run end after its round."""
        if not self.asked:
            self.listener.on_stop()
        self.asked = True
        if self.coordinator is not None:
            self.coordinator.stop.remote()

    def play(self, setup: ray.ObjectRef, spec: RunSpec, variables: Mapping[str, str]) -> bool:
        """Play to the end, with another coordinator if one dies. See `play_on_ray`."""
        setbacks = Setbacks()
        while True:
            self.coordinator = coordinator = _start_coordinator()
            if self.asked:
                self.stop()
            try:
                # An argument of its own: one this small travels with the call, and never lies in the object store.
                over = coordinator.run.remote([setup], spec, variables)
                self.follow(over)
                return ray.get(over)
            except RayTaskError as error:
                raise final_error(error, spec.output.resume, spec.output.resumed or self.reached >= 0) from None
            except RayError as error:
                if self.asked:
                    return False
                reason = " ".join(str(error).split())
                try_again(Failure("coordinator", setbacks.add(self.reached), reason, spec.output.resume))
                spec = replace(spec, output=replace(spec.output, resumed=True))
            finally:
                ray.kill(coordinator)

    def follow(self, over: ray.ObjectRef) -> None:
        """Report every round as it ends, and log the coordinator's log records, until `over`, the run's end, is there.

        Raise RayError if the coordinator dies.
        """
        assert self.coordinator is not None
        known = 0
        while True:
            ended = bool(ray.wait([over], timeout=0)[0])
            progress: Progress = ray.get(self.coordinator.progress.remote(known, POLL_S))
            for news in progress.news:
                self._take(news)
            # Also during a round, which is then the last one.
            if not self.asked and self.listener.stopping():
                self.stop()
            if progress.wave is not None:
                self.listener.on_wave(progress.wave)
            known += len(progress.news)
            if (ended or progress.over) and not progress.news:
                return

    def _take(self, news: News) -> None:
        """Log a record, or report a round."""
        if isinstance(news, logging.LogRecord):
            if log.isEnabledFor(news.levelno):
                log.handle(news)
            return
        row, means = news
        self.reached = row.round
        self.listener.on_round(row, means)


def _start_coordinator() -> Actor:
    """Start a coordinator on this node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Coordinator.options(scheduling_strategy=here).remote()  # pyright: ignore[reportAttributeAccessIssue]


def final_error(error: RayTaskError, resume: str, begun: bool = True) -> BaseException:
    """The exception that ends a run: the one that its coordinator raised, or ClusterError if Ray failed or memory ran
    out. `resume` is the command that continues the run, if it has `begun`: a round was recorded."""
    then = f"go on with: {resume}" if begun else "run it again"
    cause = unwrapped(error)
    if isinstance(cause, ClusterError):
        return cause if resume in str(cause) else ClusterError(f"{cause}; then {then}")
    if isinstance(cause, RayError):
        failure = f"Ray failed ({error_text(cause)}); raise runtime.object_store_memory_mb if its object store is full"
    elif out_of_memory(cause) and not isinstance(cause, ClientError):
        failure = f"the coordinator ran out of memory ({error_text(cause)}); use a larger machine, or fewer actors"
    else:
        return cause
    return ClusterError(f"{failure}; then {then}")
