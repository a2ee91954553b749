"""The command `rayfl`: run, resume, sweep, compare, and list what an experiment can choose."""

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

from actors import fork_server, supervision
from jobs import shipped_experiments
from jobs.arguments import (
    ABSOLUTE,
    EXPERIMENT,
    PLACE,
    SETTINGS,
    WithSettings,
    names_in,
    report_options,
    starting,
)
from jobs.display import Display, first_sentence, print_table, say, serve_any_reader
from jobs.failures import FAILED, sentences
from jobs.report_commands import COMMANDS, COMPARING
from rayfl.errors import RayflError, refuse_if
from rayfl.untyped import Foreign, Value
from rayfl.version import __version__

# Each command imports what it needs, so that `rayfl --help` loads nothing else.
if TYPE_CHECKING:
    from jobs.console import Audience


class Commands(click.Group):
    """Commands that report an error in one sentence. From a shell they run in a child process (supervision.py).

    They end early by click's Exit: a plug-in may call sys.exit, which is an error.
    """

    def __call__(self, *args: Foreign, **kwargs: Foreign) -> NoReturn:
        def command() -> None:
            serve_any_reader()
            self.main(*args, **kwargs)

        supervision.supervised(command, FAILED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click, which would cut the descriptions."""
        for command in self.commands.values():
            command.short_help = first_sentence(command.help or "")
        super().format_commands(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Foreign:
        with sentences():
            return super().invoke(ctx)


@click.group(
    cls=Commands,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__)
def main() -> None:
    """rayfl runs federated-learning experiments on Ray: the same file on a laptop, a cluster or Kubernetes."""


@main.command(cls=WithSettings)
@click.argument("file", type=EXPERIMENT)
@SETTINGS
@click.option("--rounds", type=int, help="Number of rounds, instead of the file's.")
@click.option("--actors", metavar="N", help="Number of client actors, or all; changes the time and nothing else.")
@click.option("--output", "--dir", type=PLACE, help="Run directory, or its URL; by default the next free runs/NAME.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --output if there is one.")
@click.option("--resume", "resumed", is_flag=True, help="Resume the run in --output if there is one.")
@click.option("--inline", is_flag=True, help="Run in this process, without Ray (for debugging).")
@click.option(
    "--dry-run", is_flag=True, help="Print the run's steps, bytes, time and memory; write nothing, start no Ray."
)
@click.pass_context
def run(
    context: click.Context,
    file: Path,
    overrides: Sequence[str],
    rounds: int | None,
    actors: str | None,
    output: Path | str | None,
    overwrite: bool,
    resumed: bool,
    inline: bool,
    dry_run: bool,
) -> None:
    """Run the experiment in FILE, which may be a name that `rayfl examples` lists; KEY=VALUE replaces single settings,
    as in method.lr=0.1.

    A file with a [sweep] table is run as by `rayfl sweep`, one combination after another. With --resume, the command
    starts the run in --output, resumes it, or says that it is finished, so a scheduler may repeat the same command.
    """
    refuse_if(
        [
            (
                resumed and overwrite,
                "",
                "--resume continues the run in --output and --overwrite replaces it: give one of them",
            ),
            (
                dry_run and (resumed or overwrite or output is not None),
                "",
                "--dry-run writes nothing: leave out --output, --overwrite and --resume",
            ),
        ]
    )
    settings = [*overrides, *_settings(rounds, actors, inline)]
    table, lists = _read(file, settings)
    if lists is not None:
        if isinstance(output, str):
            raise RayflError(
                f"--output {output} is a URL, but a sweep needs a directory on this machine; give "
                f"output.directory={output} for the copies"
            )
        return context.invoke(
            sweep, file=file, overrides=settings, directory=output, overwrite=overwrite, inline=inline, dry_run=dry_run
        )
    with _audience(inline or dry_run) as audience:
        from rayfl.experiment.experiment import Experiment

        # A wrong setting is refused before Ray is loaded.
        experiment = Experiment(**table)
        if dry_run:
            from jobs.dry_run import foresee

            return foresee(experiment, audience.display)
        from jobs import single

        play = single.run_or_resume if resumed else partial(single.run, overwrite=overwrite)
        raise click.exceptions.Exit(single.print_result(play(experiment, output, audience=audience), audience))


@main.command(cls=WithSettings)
@click.argument("directory", type=PLACE)
@SETTINGS
@click.option("--rounds", type=int, help="Number of rounds in all, to continue a run that is finished.")
@click.option("--actors", metavar="N", help="Number of client actors, or all; changes the time and nothing else.")
@click.option("--inline", is_flag=True, help="Resume in this process, without Ray.")
def resume(
    directory: Path | str, overrides: Sequence[str], rounds: int | None, actors: str | None, inline: bool
) -> None:
    """Resume the interrupted run in DIRECTORY. The results equal those of an uninterrupted run.

    A run at a URL, such as s3://bucket/runs/NAME, is downloaded into runs/NAME first.

    KEY=VALUE may change settings that do not change the numbers, such as runtime.address. With runtime.mixed=true the
    run can be resumed even if torch, numpy or the hardware differ.
    """
    if isinstance(directory, Path):
        supervision.tell_parent(run=str(directory))
    with _audience(inline) as audience:
        from jobs import single

        played = single.resume(directory, [*overrides, *_settings(rounds, actors, inline)], audience)
        raise click.exceptions.Exit(single.print_result(played, audience))


@contextmanager
def _audience(inline: bool) -> Iterator["Audience"]:
    """Context manager: who follows the runs of a command, shown from now on. inline: no run needs a fork server."""
    began = time.monotonic()
    with Display("loading") as display:
        if not inline:
            fork_server.begin()
        from jobs.console import Audience

        yield Audience(display=display, began=began)


def _read(file: Path, settings: Sequence[str]) -> tuple[dict[str, Value], dict[str, list[Value]] | None]:
    """Read a file and apply the overrides. Torch is not loaded, so mistakes are reported at once."""
    from rayfl.experiment.table import read_table, with_overrides

    return with_overrides(read_table(file), settings)


def _settings(rounds: int | None, actors: str | None, inline: bool) -> list[str]:
    """The options --rounds, --actors and --inline, as overrides."""
    settings = {"rounds": rounds, "runtime.actors": actors, "runtime.executor": "inline" if inline else None}
    return [f"{key}={value}" for key, value in settings.items() if value is not None]


@main.command(cls=WithSettings)
@click.argument("file", type=EXPERIMENT)
@SETTINGS
@click.option(
    "--dir", "--output", "directory", type=ABSOLUTE, help="Sweep directory; runs that finished there are not repeated."
)
@click.option("--parallel", type=int, default=1, metavar="N", help="Number of runs at once, on one machine or cluster.")
@click.option("--rounds", type=int, help="Number of rounds, instead of the file's.")
@click.option("--actors", metavar="N", help="Number of client actors of each run, or all.")
@click.option("--overwrite", is_flag=True, help="Repeat the runs that finished in --dir.")
@click.option("--inline", is_flag=True, help="Run without Ray (for debugging).")
@click.option("--dry-run", is_flag=True, help="Print the steps, bytes and time of all runs; write nothing.")
def sweep(
    file: Path,
    overrides: Sequence[str],
    directory: Path | None,
    parallel: int,
    rounds: int | None,
    actors: str | None,
    overwrite: bool,
    inline: bool,
    dry_run: bool,
    **options: Value,
) -> None:
    """Run all combinations of the [sweep] table in FILE and compare them on one page.

    KEY=VALUE replaces single settings. KEY=VALUE for a swept KEY removes KEY from the sweep; sweep.KEY=[...] adds it.
    """
    reported = (f"report.{key}={json.dumps(value)}" for key, value in report_options(options).items())
    settings = [*overrides, *_settings(rounds, actors, inline), *reported]
    table, lists = _read(file, settings)
    if lists is None:
        raise RayflError(f"{file} has no [sweep] table; add one, or give sweep.KEY=[...], or use: rayfl run {file}")
    with _audience(inline or dry_run) as audience:
        from rayfl.experiment.sweep import combine

        combinations = combine(table, lists, settings)
        if dry_run:
            from jobs.dry_run import foresee_all

            return foresee_all(combinations, audience.display)
        from jobs.sweep import sweep as run_all

        raise click.exceptions.Exit(run_all(combinations, directory, parallel, overwrite, audience))


sweep.params.extend(COMPARING)


@main.command(cls=WithSettings)
@click.argument("paper", type=click.Path(path_type=Path))
@SETTINGS
@click.option("--dir", "--output", "directory", type=ABSOLUTE, help="Directory; runs that finished are not repeated.")
@click.option("--quick", is_flag=True, help="A few rounds and seeds, to try the sweeps in minutes.")
@click.option("--parallel", type=int, default=1, metavar="N", help="Number of runs at once.")
@click.option("--only", metavar="SWEEP,...", default="", help="Run these sweeps alone.")
def reproduce(
    paper: Path, overrides: Sequence[str], directory: Path | None, quick: bool, parallel: int, only: str
) -> None:
    """Run the sweeps of PAPER and write the verdict on each of its claims: reproduced, refuted or undecided.

    PAPER is a name, such as elastic, or a folder of your own with sweep files and claims.toml. KEY=VALUE changes
    settings of all sweeps, as in "sweep.seed=[1,2,3]".
    """
    began = time.monotonic()
    from jobs.reproduce import reproduce as run_sweeps

    names = [name.strip() for name in only.split(",") if name.strip()]
    raise click.exceptions.Exit(run_sweeps(paper, overrides, directory, quick, parallel, names, began))


@main.command(cls=WithSettings)
@click.argument("file", type=EXPERIMENT)
@SETTINGS
@click.option("--budget", type=click.IntRange(1), required=True, metavar="N", help="Number of trials of each method.")
@click.option("--dir", "--output", "directory", type=ABSOLUTE, help="Directory; a stopped tuning continues there.")
@click.option("--rounds", type=int, help="Number of rounds, instead of the file's.")
@click.option("--actors", metavar="N", help="Number of client actors of each run, or all.")
@click.option("--inline", is_flag=True, help="Run without Ray (for debugging).")
def tune(
    file: Path,
    overrides: Sequence[str],
    budget: int,
    directory: Path | None,
    rounds: int | None,
    actors: str | None,
    inline: bool,
) -> None:
    """Try values of the settings in the [tune] table of FILE, on validation data, and write the experiment with the
    best ones. In a file with a [sweep] table, each of its methods or cases gets this number of trials.

    KEY=VALUE replaces single settings. KEY=VALUE for a tuned KEY removes KEY from the table; tune.KEY=... adds it.
    """
    settings = [*overrides, *_settings(rounds, actors, inline)]
    table, lists = _read(file, settings)
    with _audience(inline) as audience:
        from jobs import tune as tuning

        raise click.exceptions.Exit(tuning.tune(tuning.Tuning(table, lists, settings), budget, directory, audience))


@main.command(cls=WithSettings)
@click.argument("file", type=EXPERIMENT)
@SETTINGS
@click.option("--write-partition", type=ABSOLUTE, metavar="OUT", help="Write who has which examples to a JSON file.")
def data(file: Path, overrides: Sequence[str], write_partition: Path | None) -> None:
    """Show how the data are split among the clients, as a table. For a sweep, its first experiment.

    `partition = {name = "file", path = OUT}` reads what --write-partition writes.
    """
    with Display("reading the data") as display:
        from rayfl.data.loading import read_dataset
        from rayfl.data.partitions import from_file as partitions
        from rayfl.experiment.experiment import read
        from rayfl.experiment.prepare import assigned, make_task, split_data
        from rayfl.experiment.sweep import read_sweep
        from rayfl.report.partition_table import table

        combinations = read_sweep(file, overrides)
        experiment = combinations[0].experiment if combinations else read(file, overrides)
        dataset = read_dataset(experiment.data)
        make_task(experiment, dataset)
        if write_partition is not None:
            partitions.write_partition(assigned(experiment, dataset)[1], write_partition)
        dataset, partition = split_data(experiment, dataset)
        display.close()
        print_table(table(dataset, partition, unseen=experiment.clients.unseen_numbers(experiment.seed)), 140)
        for line in dataset.in_words(200):
            say(line)


@main.command()
def examples() -> None:
    """List the experiments that come with rayfl: `rayfl run NAME` runs one from anywhere."""
    print_table(shipped_experiments.table(), 120)
    say(f"rayfl run NAME runs one; their files lie in {shipped_experiments.FOLDER}")


@main.command()
@click.argument("file", type=click.File("x", encoding="utf-8"), default="experiment.toml")
def init(file: TextIO) -> None:
    """Write a commented experiment file to begin with, by default experiment.toml. It never replaces a file."""
    file.write(shipped_experiments.TEMPLATE.read_text(encoding="utf-8"))
    say(f"run it with: rayfl run {shlex.quote(file.name)}")


def _catalogue(command: str, table: str) -> None:
    """Add the command that lists what the experiment's `table` can choose, or shows one of them."""

    @main.command(command, help=f"List the {command}, or show NAME (or FILE.py:CLASS): settings and an example.")
    @click.argument("name", required=False, shell_complete=lambda *given: starting(names_in(table), given[-1]))
    def list_or_show(name: str | None) -> None:
        with Display("loading") as display:
            from jobs import catalogue

            display.close()
            if name is not None:
                catalogue.print_one(table, name)
            else:
                catalogue.print_list(table)
                say(f"rayfl {command} NAME shows one, with all its settings and an example.")


for _command, _table in {
    "methods": "method",
    "models": "model",
    "tasks": "task",
    "datasets": "data",
    "partitions": "partition",
    "compressors": "uplink",
    "topologies": "topology",
    "selections": "selection",
    "schedules": "schedule",
    "wrappers": "wrap",
    "metrics": "evaluation.metrics",
}.items():
    _catalogue(_command, _table)


if __name__ == "__main__":
    main()
