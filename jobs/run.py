"""Run one experiment: from Python (`run(Experiment(...))`), or as `python -m jobs.run FILE [KEY=VALUE ...]`."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from actors import session
from actors.placement import nodes, place
from jobs import console
from rayfl import machine
from rayfl.config import Experiment, read, to_toml
from rayfl.executor import InlineExecutor
from rayfl.play import play
from rayfl.prepare import prepare
from rayfl.record import create_run_directory, describe_run, read_run
from rayfl.report import report, summary


def run(experiment: Experiment, output: Path | None = None, overwrite: bool = False) -> Path:
    """Run an experiment into a run directory and return it.

    `output`: the run directory; None: the next free one of the name under `experiment.output.directory`. ValueError,
    before anything is written, where parts of the experiment do not fit each other or the cluster.
    """
    setup = prepare(experiment)
    inline = experiment.runtime.executor == "inline"
    with nullcontext() if inline else session.session(experiment.runtime):
        if not inline:
            place(experiment.runtime, nodes())
        directory = create_run_directory(output or free_directory(experiment), overwrite)
        describe_run(directory, experiment.as_dict(), machine.describe(setup.threads), to_toml(experiment))
        with console.following(experiment.rounds, experiment.label or experiment.name) as listener:
            if inline:
                save, executor = experiment.output.save_models, InlineExecutor(setup)
                play(setup, executor, directory, lambda record: listener(record.row, record.means), save)
            else:
                session.play(experiment, setup, directory, listener)
    if experiment.output.report:
        report([directory], directory / "report.html")
    return directory


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
    experiment = read(file, overrides)
    directory = run(experiment, output, overwrite)
    page, records = directory / "report.html", read_run(directory)
    console.result(summary(records), page if page.exists() else None)
    if not records.finished:
        print(f"stopped after {len(records.rounds)} of {experiment.rounds} rounds; what was recorded is kept")
    return records.finished


if __name__ == "__main__":
    from jobs.cli import run as command

    command()
