"""Play an experiment from its first round, or from its last checkpoint, to its end in a run directory."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayfl import tree
from rayfl.data.transfer import to_memory
from rayfl.errors import log
from rayfl.rounds.evaluate_round import personal_models
from rayfl.rounds.executor import Executor, OnWave
from rayfl.rounds.ledger import OnRound, RoundRecord
from rayfl.rounds.resources import totals
from rayfl.rounds.rounds import RunState, is_over, simulate
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.run_directory.description import RESOURCES, read_resources, write_metric_facts
from rayfl.run_directory.disk import write_json, writing
from rayfl.run_directory.record import Recorder, read_tables
from rayfl.run_directory.saved_models import (
    CONSTANTS,
    model_files,
    read_model_inputs,
    save_model,
    write_model_inputs,
)
from rayfl.run_directory.trackers.tracker import TrackerName
from rayfl.run_directory.tracking import Tracking


class Stopped(Exception):
    """The run was asked to end before its last round; it can be resumed."""


@dataclass(frozen=True)
class RunOutput:
    """What a run writes into its directory.

    `resumed`: continue from the newest undamaged checkpoint there, or from the start if there is none; the records of
    later rounds are dropped.
    """

    directory: Path
    save_models: bool = True
    trackers: Collection[TrackerName] = ()
    checkpoints: checkpoint.Checkpoints = field(default_factory=lambda: checkpoint.Checkpoints(every=0))
    resumed: bool = False

    @property
    def resume(self) -> str:
        """The command that continues the run."""
        return f"rayfl resume {self.directory}"


@dataclass(frozen=True)
class Listener:
    """The functions that a run calls.

    `on_round`: with every round's row and means. `on_wave`: about once a second, with the progress of the round.
    `on_stop`: when a first signal comes. `stopping`: after each round, and on Ray about once a second; if it returns
    true, the run ends as after a signal. `hurrying`: after each round; if it returns true, a checkpoint is saved.
    """

    on_round: OnRound = lambda row, means: None
    on_wave: OnWave = lambda wave: None
    on_stop: Callable[[], object] = lambda: None
    stopping: Callable[[], bool] = lambda: False
    hurrying: Callable[[], bool] = lambda: False


def play_run(setup: Setup, executor: Executor, output: RunOutput, listener: Listener | None = None) -> RunState:
    """Run all rounds, record and track each, save checkpoints and the final models. If this is interrupted, the records
    can be read. If the listener stops the run, a checkpoint is saved and `Stopped` raised.

    The log says from which checkpoint a resumed run continues, which checkpoints are damaged or could not be written,
    and which trackers failed. Raise DiskError if the records or the models cannot be written.
    """
    directory = output.directory
    listener = listener or Listener()
    run_state, earlier = recalled(setup, executor, directory) if output.resumed else (None, None)
    rounds_done = run_state.round if run_state else 0
    saved: checkpoint.Saved | None = None
    before = read_resources(directory) if output.resumed else {}
    with Recorder(directory, earlier, rounds_done) as recorder, Tracking(directory, output.trackers) as tracking:
        with writing(directory, f"go on with: {output.resume}"):
            write_metric_facts(directory, setup.metric_facts)

        def note_resources() -> None:
            with writing(directory, f"go on with: {output.resume}"):
                write_json(directory / RESOURCES, totals(executor.used(), before))

        def record_round(record: RoundRecord, run_state: RunState) -> None:
            nonlocal saved
            recorder.round(record.row, record.clients, record.metrics)
            if output.save_models and setup.stop is not None and setup.stop.keeps(run_state.stop, record.means):
                write_models(setup, executor, run_state, output)
            last = is_over(setup, run_state)
            stop = not last and listener.stopping()
            if output.checkpoints.due(run_state.round, last or stop or listener.hurrying()):
                recorder.sync()
                saved = checkpoint.save(directory, run_state, executor, recorder.num_rows, setup.identity, saved)
                note_resources()
            listener.on_round(record.row, record.means)
            tracking.round(record.row, record.means)
            if stop:
                raise Stopped

        run_state = simulate(setup, executor, record_round, run_state)
        if setup.stop is not None and (why := setup.stop.reason(run_state.stop)):
            log.info("ended early after %d of %d rounds: %s", run_state.round, setup.rounds, why)
        note_resources()
        if output.save_models:
            for path in kept_models(setup, directory) or write_models(setup, executor, run_state, output):
                tracking.model(path)
    return run_state


def kept_models(setup: Setup, directory: Path) -> list[Path]:
    """The files of the best models, if an early stop keeps them and an evaluation had a value; [] otherwise."""
    if setup.stop is None or setup.stop.settings.keep == "last":
        return []
    paths = [path for name in ("global", "personal") for path in model_files(directory, name)]
    if paths:
        log.info("models/ has the models of round %d, the best evaluation", read_model_inputs(directory).round)
    return paths


def write_models(setup: Setup, executor: Executor, run_state: RunState, output: RunOutput) -> list[Path]:
    """Write the models of a round; returns their files. Raise DiskError if that fails."""
    models = final_models(setup, executor, run_state)
    with writing(output.directory, f"go on with: {output.resume}"):
        if models:
            outputs = setup.method.task.num_outputs(setup.dataset)
            of_round = run_state.round - 1 if setup.stop is not None and setup.stop.settings.keep == "best" else None
            write_model_inputs(output.directory, replace(setup.dataset, num_classes=outputs), setup.precision, of_round)
        return [path for name, parts in models.items() for path in save_model(output.directory, name, parts)]


def recalled(setup: Setup, executor: Executor, directory: Path) -> tuple[RunState | None, Mapping[str, pa.Table]]:
    """The run state of the newest usable checkpoint whose rounds are on record (None: start again), and the records."""
    tables = read_tables(directory)

    def rows(rounds: int) -> dict[str, int]:
        """The rows of each table in a number of first rounds. A table has its rounds in order."""
        return {name: int(np.searchsorted(table["round"], rounds)) for name, table in tables.items()}

    run_state = checkpoint.load(directory, executor, rows, setup.identity)
    if run_state is None:
        log.info("there is no checkpoint: starting from round 0")
    else:
        log.info("going on from the checkpoint before round %d", run_state.round)
    return run_state, tables


def final_models(setup: Setup, executor: Executor, run_state: RunState) -> Mapping[str, Iterable[tree.Tree]]:
    """ "global": the server's model; "personal": every client's own one, under keys such as "12/fc.weight".

    They come in parts: each client's model is made when it is asked for, since all together can be larger than memory.
    Personal ones are there if clients keep models or adapt the server's before they are evaluated. The constants of the
    model are in the global one, and once beside the personal ones, under keys such as "constants/conv.weight".
    """
    models: dict[str, Iterable[tree.Tree]] = {}
    constants = {name: tree.tensor_over(array) for name, array in setup.method.task.constants.items()}
    if not setup.is_peer and (model := setup.server_half.model(run_state.server)):
        models["global"] = [{**constants, **to_memory(model, setup.device)}]
    if setup.method.capabilities.personalized or setup.method.eval_stages(run_state.round - 1):
        personal = (tree.flatten({str(client): model}) for client, model in personal_models(setup, executor, run_state))
        models["personal"] = chain([tree.flatten({CONSTANTS: constants})] if constants else [], personal)
    return models
