"""Run one experiment, or go on with one: from Python, or as `python -m jobs.run FILE [KEY=VALUE ...]`."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from actors import session
from actors.placement import nodes, place
from jobs import console
from rayfl import machine
from rayfl.config import Experiment, read, to_toml
from rayfl.executor import InlineExecutor
from rayfl.play import Stopped, play
from rayfl.prepare import prepare
from rayfl.record import Run, create_run_directory, describe_run, read_run
from rayfl.report import report, summary
from rayfl.series import science
from rayfl.settings import SettingsError, shown
from rayfl.setup import Setup


def run(experiment: Experiment, output: Path | None = None, overwrite: bool = False) -> Path:
    """Run an experiment into a run directory and return it.

    `output`: the run directory; None: the next free one of the name under `experiment.output.directory`. ValueError,
    before anything is written, where parts of the experiment do not fit each other or the cluster.
    """
    setup = prepare(experiment)
    inline = experiment.runtime.executor == "inline"
    with nullcontext() if inline else session.session(experiment.runtime, setup):
        if not inline:
            place(experiment.runtime, nodes())
        directory = create_run_directory(output or free_directory(experiment), overwrite)
        describe_run(directory, experiment.as_dict(), machine.describe(setup.threads), to_toml(experiment))
        _play(experiment, setup, directory, resumed=False)
    return directory


def resume(directory: Path, overrides: Sequence[str] = (), anywhere: bool = False) -> Path:
    """Go on with the run in `directory` where it was cut, or with more rounds; returns `directory`.

    `overrides` may change what does not change the numbers (runtime, output, checkpoint, report) and raise `rounds`.
    `anywhere`: also on a platform whose arithmetic may differ. SettingsError for anything else.
    """
    before = read_run(directory)
    experiment = resumable(before, overrides)
    setup = prepare(experiment)
    here = machine.describe(setup.threads)
    if not anywhere:
        check_platform(before.platform, here)
    describe_run(directory, experiment.as_dict(), here, to_toml(experiment))
    _play(experiment, setup, directory, resumed=True)
    return directory


def resumable(before: Run, overrides: Sequence[str]) -> Experiment:
    """The experiment of a run, changed by overrides. SettingsError where these would change what was done so far."""
    experiment = read(before.directory / "experiment.toml", overrides)
    old, new = science(before.experiment), science(experiment.as_dict())
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and key != "rounds":
            raise SettingsError(
                f"a resumed run keeps its {key}={shown(old.get(key))}; start a new run to change it to "
                f"{shown(new.get(key))}"
            )
    if experiment.seed != before.experiment.get("seed"):
        raise SettingsError(
            f"a resumed run keeps its seed={before.experiment.get('seed')}; start a new run for another"
        )
    if experiment.rounds < len(before.rounds):
        raise SettingsError(
            f"rounds={experiment.rounds} is fewer than the {len(before.rounds)} that {before.directory} has"
        )
    if before.finished and experiment.rounds == len(before.rounds):
        raise SettingsError(
            f"{before.directory} is finished; give --rounds to go on with more than {experiment.rounds}"
        )
    return experiment


def check_platform(before: Mapping[str, object], here: Mapping[str, object]) -> None:
    """SettingsError where the numbers would not be those of one undisturbed run."""
    for key in machine.DECISIVE:
        if before.get(key) != here.get(key):
            raise SettingsError(
                f"the run was made with {key}={before.get(key)}, and here {key}={here.get(key)}, so its numbers would "
                "not be those of an undisturbed run; resume it where it began, or give --anywhere to go on all the same"
            )


def _play(experiment: Experiment, setup: Setup, directory: Path, resumed: bool) -> None:
    with console.following(experiment.rounds, experiment.label or experiment.name) as listener:
        if experiment.runtime.executor == "inline":
            with session.stoppable() as stopping, suppress(Stopped):
                play(
                    setup,
                    InlineExecutor(setup),
                    directory,
                    lambda record: listener(record.row, record.means),
                    save_models=experiment.output.save_models,
                    checkpoints=experiment.checkpoint,
                    resumed=resumed,
                    stopping=stopping,
                    notice=listener.notice,
                )
        else:
            session.play(experiment, setup, directory, listener, notice=listener.notice, resumed=resumed)
    if experiment.output.report:
        report([directory], directory / "report.html")


def free_directory(experiment: Experiment) -> Path:
    """runs/NAME, or runs/NAME-2, ... where there is a run already."""
    base = Path(experiment.output.directory) / experiment.name
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def run_file(file: Path, overrides: Sequence[str], output: Path | None, overwrite: bool) -> bool:
    """Run the experiment in a file and print its result. False if a signal ended the run before its last round."""
    return told(run(read(file, overrides), output, overwrite))


def told(directory: Path) -> bool:
    """Print the result of the run in `directory`. False if a signal ended it before its last round."""
    page, records = directory / "report.html", read_run(directory)
    console.result(summary(records), page if page.exists() else None)
    if not records.finished:
        rounds = records.experiment["rounds"]
        print(f"stopped after {len(records.rounds)} of {rounds} rounds; go on with: rayfl resume {directory}")
    return records.finished


if __name__ == "__main__":
    from jobs.cli import run as command

    command()
