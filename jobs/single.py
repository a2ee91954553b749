"""Run one experiment, or go on with one."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any

from actors import fork_server, package_folder, session, supervisor
from jobs import console
from jobs.console import Audience
from jobs.display import Display
from jobs.places import (
    Place,
    brought,
    clear_copy,
    copy_of,
    fetch_newer,
    has_copy,
    lacks_copy,
    local_folder,
    placed,
    require_free_copy,
)
from jobs.run_page import DRAWING, RunPage, draw
from rayfl.determinism import platform
from rayfl.errors import RayflError, reason
from rayfl.experiment.description import write_description
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.experiment_file import override, split_override
from rayfl.experiment.identity import determining_settings
from rayfl.experiment.input_files import KeptFiles, kept_files, names_file
from rayfl.experiment.prepare import prepare
from rayfl.limits.json_files import MOST_BYTES, require_shallow
from rayfl.limits.regular_files import read_text
from rayfl.report.summary import summary
from rayfl.rounds.errors import MethodError
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.setup import Setup
from rayfl.run_directory.atomic_files import writing
from rayfl.run_directory.mirror import Mirror, mirrored, require_writable
from rayfl.run_directory.object_storage import Storage, below, is_url, parted
from rayfl.run_directory.origin import write_origin
from rayfl.run_directory.output_files import REPORT, require_replaceable
from rayfl.run_directory.play_run import Stopped, play_run
from rayfl.run_directory.record import Run, locked, new_run_directory, read_run
from rayfl.run_directory.run_entries import remove_entries, require_no_links, require_own_entries
from rayfl.settings import dotted, shown

_LOG = getLogger("rayfl.jobs")


def run(
    experiment: Experiment, output: Place | None = None, overwrite: bool = False, audience: Audience | None = None
) -> Path:
    """Run an experiment into a run directory and return it.

    `output`: the run directory, or the URL of its copy, and then it is runs/NAME here; None: the next free one of the
    name under `experiment.output.directory`. ValueError, where parts of the experiment do not fit each other, the
    cluster or the storage, and then nothing is left of the directory; DiskError where the directory cannot be written
    to, and at the end where the copy cannot.
    """
    audience = audience or Audience()
    directory, experiment = placed(output or free_directory(experiment), experiment)
    url = copy_of(directory, experiment.output.directory)
    require_free_copy(url, overwrite)
    setup = _prepared(experiment, audience)
    files, here = kept_files(experiment.as_dict()), _here(experiment)
    supervisor.report(run=str(directory))
    with ExitStack() as copying:
        with _placed(experiment, setup, audience), ExitStack() as taken:
            if output is None:
                directory = _next_free(experiment, directory, taken)
                url = copy_of(directory, experiment.output.directory)
                supervisor.report(run=str(directory))
            else:
                taken.enter_context(new_run_directory(directory, overwrite))
            page = RunPage(experiment, directory, audience)
            clear_copy(url if overwrite else None)
            with writing(directory, "run it again"):
                write_description(directory, files, here if experiment.runtime.executor == "inline" else None)
                write_origin(directory)
            mirror = copying.enter_context(mirrored(directory, url))
            _play(experiment, setup, files, here, audience, page, mirror, resumed=False)
            page.begin()
        page.finish()
    return directory


def _next_free(experiment: Experiment, directory: Path, taken: ExitStack) -> Path:
    """Make `directory`, which was free, or the next free one where another run has taken it meanwhile; `taken` removes
    it where the run is refused. Returns it."""
    while True:
        try:
            return taken.enter_context(new_run_directory(directory, absent=True))
        except FileExistsError:
            directory = free_directory(experiment).absolute()


def resume(place: Place, overrides: Sequence[str] = (), audience: Audience | None = None) -> Path:
    """Go on with the run in `place`, a directory or a URL, where it was cut, or with more rounds.

    Returns its directory. A finished run whose page is missing, because its process was killed as it drew it, gets its
    page, and one that is not all in its storage is copied there.

    `overrides` may change what does not change the numbers (runtime, output, checkpoint, report) and raise `rounds`.
    RayflError for anything else, and where this machine computes other bits, unless runtime.mixed is set.
    """
    directory, overrides = found_again(place, overrides)
    before = read_run(directory)
    changed: dict[str, Any] = {}
    for one in overrides:
        override(changed, one)
    if before.finished and "rounds" not in changed:
        folder = dotted(changed).get("output.directory", _folder_of(before))
        if finish_up(before, str(folder), _wants_page(before), audience or Audience()):
            return directory
    experiment = resumable(before, overrides)
    warn_of_package(directory, experiment)
    return go_on(before, experiment, audience)


def found_again(place: Place, overrides: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """The directory of a run to go on with, fetched from its storage where `place` is a URL, and the overrides with the
    folder in which its copy lies."""
    if not isinstance(place, str):
        return place.absolute(), list(overrides)
    return brought(place), [f"output.directory={json.dumps(parted(place)[0])}", *overrides]


def finish_up(before: Run, folder: str, page: bool, audience: Audience) -> bool:
    """Give a finished run what it lacks of its page, if it is to have one, and of its copy in `folder`, its
    `output.directory`; returns whether it lacked something."""
    page = page and not (before.directory / "report.html").exists()
    if page:
        audience.stage(DRAWING)
        draw(before.directory)
    url = lacks_copy(before.directory, folder)
    if url is not None:
        audience.stage(f"copying to {url}")
        with mirrored(before.directory, url):
            pass
    return page or url is not None


def _wants_page(run: Run) -> bool:
    """Whether a run was to have a page."""
    output = run.experiment.get("output")
    return isinstance(output, Mapping) and output.get("report") is True


def go_on(before: Run, experiment: Experiment, audience: Audience | None = None) -> Path:
    """Go on with a run as `experiment`, which differs from it in nothing that decides its numbers.

    RayflError, before anything is written, where that is impossible here, or would write to another place.
    """
    audience = audience or Audience()
    require_no_links(before.directory)
    url = copy_of(before.directory, experiment.output.directory)
    if url is not None:
        require_writable(Storage(url))
    if experiment.output.report:
        require_replaceable(before.directory / "report.html", REPORT)
    files = kept_files(experiment.as_dict())
    setup = _prepared(experiment, audience)
    here = check_platform(before, experiment)
    command = f"rayfl resume {before.directory}"
    supervisor.report(run=str(before.directory))
    page = RunPage(experiment, before.directory, audience)
    with mirrored(before.directory, url) as mirror:
        with _placed(experiment, setup, audience, command):
            if experiment.runtime.executor == "inline":
                found = platform.with_kind(before.platform, here) if before.platform else here
                with writing(before.directory, f"go on with: {command}"):
                    write_description(before.directory, files, found)
            _play(experiment, setup, files, here, audience, page, mirror, resumed=True)
            page.begin()
        page.finish()
    return before.directory


def _here(experiment: Experiment) -> platform.Platform:
    """This process, and its GPU if it is to compute on one."""
    runtime = experiment.runtime
    return platform.describe(runtime.threads, runtime.device_name if runtime.executor == "inline" else "cpu")


def _prepared(experiment: Experiment, audience: Audience) -> Setup:
    audience.stage(f"{experiment.name}: reading the data and building the model")
    return prepare(experiment)


@contextmanager
def _placed(experiment: Experiment, setup: Setup, audience: Audience, resume: str | None = None) -> Iterator[None]:
    """A Ray with room for the experiment's actors, if it needs one. A failure here comes before anything is written.

    `resume`: the command that goes on, of a run that was begun before.
    """
    if experiment.runtime.executor == "inline":
        fork_server.end()
        yield
        return
    audience.stage(f"{experiment.name}: {session.opening(experiment.runtime)}")
    with session.session(experiment.runtime, setup, resume):
        session.placed(experiment.runtime, setup)
        yield


def earlier_run(
    directory: Path, experiment: Experiment, ways: str = "name another --dir, or give --overwrite"
) -> Run | None:
    """The run of `experiment` in `directory`, which is finished or can go on here with the same bits; None: no run yet.

    RayflError, with the `ways` out of it, for a run of other settings, a damaged one, and one that was cut on
    another platform.
    """
    if not (directory / "experiment.json").is_file():
        return None
    try:
        found = read_run(directory)
    except RayflError as error:
        raise RayflError(f"{error}; or {ways}") from None
    state = "a finished" if found.finished else "an unfinished"
    if changed := changed_settings(found, experiment):
        raise RayflError(f"{directory} holds {state} run with other settings ({changed}): {ways}")
    if not found.finished:
        try:
            check_platform(found, experiment)
        except RayflError as error:
            raise RayflError(f"{directory} holds an unfinished run: {error}; or {ways}") from None
    return found


_MOST_SHOWN = 3
"""Of the settings in which two experiments differ."""


def changed_settings(found: Run, experiment: Experiment) -> str:
    """The settings, seed, rounds and files in which a run differs from this experiment, in words; "" where in none."""
    before, now = found.experiment, kept_files(experiment.as_dict()).table
    old, new = ({**determining_settings(table), "seed": table.get("seed")} for table in (before, now))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    words = [f"{key}={shown(old.get(key))} -> {shown(new.get(key))}" for key in changed[:_MOST_SHOWN]]
    more = len(changed) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


def describe_again(before: Run, experiment: Experiment) -> None:
    """Write the experiment of a run again: settings that do not change its numbers may differ."""
    require_no_links(before.directory)
    write_description(before.directory, kept_files(experiment.as_dict()), before.platform or None)


# Any: settings from Python.
def resumable(before: Run, overrides: Sequence[str], settings: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment of a run, changed by overrides, and by settings by their dotted keys.

    RayflError where these would change what was done so far.
    """
    if of_sweep := [one for one in overrides if split_override(one)[0][0] == "sweep"]:
        raise RayflError(f"{shown(of_sweep[0])} is no setting of a run; give it to: rayfl sweep")
    _require_whole_toml(before)
    experiment = read(before.directory / "experiment.toml", overrides, settings)
    old, new = determining_settings(before.experiment), determining_settings(kept_files(experiment.as_dict()).table)
    for key in sorted(old.keys() | new.keys()):
        if names_file(key, old.get(key)) and old.get(key) != new.get(key):
            raise RayflError(
                f"the file of {key} is not what the run in {before.directory} began with, {old.get(key)}; give "
                f"{key}=FILE with a copy of that"
            )
        if old.get(key) != new.get(key) and key != "rounds":
            raise RayflError(
                f"a resumed run keeps its {key}={shown(old.get(key))}; start a new run to change it to "
                f"{shown(new.get(key))}"
            )
    if experiment.seed != before.experiment.get("seed"):
        raise RayflError(f"a resumed run keeps its seed={before.experiment.get('seed')}; start a new run for another")
    planned = before.experiment.get("rounds")
    if not isinstance(planned, int):
        raise RayflError(f"{before.directory / 'experiment.json'} has rounds={shown(planned)}: restore it")
    if len(before.rounds) and changes_past_rounds(experiment, planned):
        raise RayflError(
            f"rounds={experiment.rounds} would have changed the rounds so far, as method {experiment.method.name!r} "
            f"follows the number of rounds, which was {planned}; start a new run"
        )
    if experiment.rounds < len(before.rounds):
        raise RayflError(
            f"rounds={experiment.rounds} is fewer than the {len(before.rounds)} that {before.directory} has"
        )
    if before.finished and experiment.rounds == len(before.rounds):
        raise RayflError(f"{before.directory} is finished; give --rounds to go on with more than {experiment.rounds}")
    return experiment


def _require_whole_toml(before: Run) -> None:
    """RayflError unless the run's TOML file, which its user may have edited, has every setting of its JSON file."""
    path = before.directory / "experiment.toml"
    try:
        text = read_text(path, MOST_BYTES)
        table = tomllib.loads(text)
        require_shallow(table)
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no TOML, or is nested too deep"
        raise RayflError(f"{path} cannot be read ({why}): restore it, or run the experiment again") from None
    known = dotted(table)
    for key, value in dotted(before.experiment).items():
        if value is not None and key not in known:
            raise RayflError(
                f"{path} lacks {key}, which experiment.json beside it has, so it was cut: write {key} there again, or "
                "restore it"
            )
    if not text.endswith("\n"):
        raise RayflError(f"{path} was cut in its last line: complete it, or restore it")


def changes_past_rounds(experiment: Experiment, planned: int) -> bool:
    """Whether changing the number of rounds from `planned` changes rounds already played."""
    hyper, rounds = experiment.method.hyper, experiment.rounds
    depends = experiment.method.kind.depends_on_num_rounds
    return rounds != planned and (depends or hyper.for_num_rounds(rounds) != hyper.for_num_rounds(planned))


def check_platform(before: Run, experiment: Experiment) -> platform.Platform:
    """What this process is. RayflError where the numbers would not be those of one undisturbed run.

    On Ray this process only prepares the run, and the coordinator compares the actors.
    """
    here = _here(experiment)
    nothing_computed = not before.platform and not len(before.rounds)
    if nothing_computed or experiment.runtime.mixed:
        return here
    unlike = platform.differences(platform.of_driver(before.platform), here, platform.ON_CPU)
    if experiment.runtime.executor == "inline":
        unlike = platform.differences(before.platform, here) or unlike
    if unlike:
        raise RayflError(
            f"the run was made with {platform.listed(unlike)}, so its numbers would not be those of an undisturbed "
            "run; resume it where it began, or set runtime.mixed=true to go on all the same"
        )
    return here


def _play(
    experiment: Experiment,
    setup: Setup,
    files: KeptFiles,
    here: platform.Platform,
    audience: Audience,
    page: RunPage,
    mirror: Mirror | None,
    resumed: bool,
) -> None:
    """Play all rounds that are left."""
    directory = page.directory
    following = console.following(experiment.rounds, experiment.label or experiment.name, audience)
    with _naming_the_way_back(directory), following as show:
        for what in experiment.in_memory:
            _LOG.warning(f"{what} was given from Python and cannot be imported: this run cannot be resumed")

        def on_round(row: RoundRow, means: Mapping[str, float]) -> None:
            if mirror is not None:
                mirror.round_done()
            show(row, means)
            audience.on_round(row, means)
            page.load()

        if experiment.runtime.executor == "inline":
            with session.stoppable(show.stopping) as stopping, suppress(Stopped):
                play_run(
                    setup,
                    InlineExecutor(setup, show.wave),
                    directory,
                    lambda record: on_round(record.row, record.means),
                    save_models=experiment.output.save_models,
                    trackers=experiment.output.track,
                    checkpoints=experiment.checkpoint,
                    resumed=resumed,
                    stopping=lambda: stopping() or audience.stopping(),
                )
        else:
            session.play_on_ray(
                experiment,
                setup,
                directory,
                on_round,
                resumed=resumed,
                files=files,
                driver=here,
                stopping=audience.stopping,
                on_wave=show.wave,
                on_stop=show.stopping,
            )


@contextmanager
def _naming_the_way_back(directory: Path) -> Iterator[None]:
    """An error of somebody's own method says that the run stays, and how it goes on."""
    try:
        yield
    except MethodError as error:
        raise MethodError(f"{error}; the rounds before it are kept, go on with: rayfl resume {directory}") from error


def warn_of_package(directory: Path, experiment: Experiment) -> None:
    """Log that what is written there will be deleted, if it will, and is copied nowhere."""
    if copy_of(directory, experiment.output.directory) is None and (sentence := package_folder.warning(directory)):
        _LOG.warning(sentence)


def free_directory(experiment: Experiment) -> Path:
    """runs/NAME, or runs/NAME-2, ... where there is a run already, here or in the storage."""
    base = local_folder(experiment) / experiment.name
    number, path = 1, base
    while path.exists() or has_copy(path, experiment.output.directory):
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def run_and_print(experiment: Experiment, output: Place | None, overwrite: bool, display: Display) -> bool:
    """Run an experiment and print its result. False if a signal ended the run before its last round."""
    directory, experiment = placed(output or local_folder(experiment) / experiment.name, experiment)
    warn_of_package(directory, experiment)
    return print_result(run(experiment, output, overwrite, Audience(display=display)), display, experiment)


def run_or_resume(experiment: Experiment, output: Place | None, display: Display) -> bool:
    """Begin an experiment's run in `output`, go on with it, or say that it is finished, and print its result.

    `output`: a directory or a URL; None: NAME in the storage that is the experiment's `output.directory`.
    False if a signal ended the run before its last round. The same call may be repeated after any end, a kill too.
    RayflError where the place holds a run of other settings, or something else.
    """
    audience = Audience(display=display)
    if output is None and not is_url(experiment.output.directory):
        raise RayflError("--resume needs the directory of the run, give it in --output")
    directory, experiment = placed(output or local_folder(experiment) / experiment.name, experiment)
    if url := copy_of(directory, experiment.output.directory):
        audience.stage(f"looking at {url}")
        fetch_newer(url, directory)
    warn_of_package(directory, experiment)
    before = earlier_run(directory, experiment, "name another --output")
    if before is None:
        _clear_what_began_nothing(directory)
        run(experiment, directory, audience=audience)
    elif not before.finished:
        go_on(before, experiment, audience)
    else:
        finish_up(before, experiment.output.directory, experiment.output.report, audience)
        print(f"{directory} is finished: nothing is left to run")
    return print_result(directory, display, experiment)


def _clear_what_began_nothing(directory: Path) -> None:
    """Remove what a run left in `directory` that was killed before its experiment was written.

    RayflError for anything else there but an empty directory.
    """
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if (directory / "records").exists():
        raise RayflError(f"{directory} is a run that lost its experiment.json: restore it, or name another --output")
    require_own_entries(directory)
    with locked(directory):
        remove_entries(directory)


def print_result(directory: Path, display: Display, experiment: Experiment | None = None) -> bool:
    """Print the result of the run in `directory` below what the display has shown. False if a signal ended it before
    its last round. `experiment`: the one that was run; None: as the run directory has it."""
    page, records = directory / "report.html", read_run(directory)
    display.close()
    console.result(summary(records), page if page.exists() else None)
    folder = experiment.output.directory if experiment else _folder_of(records)
    if is_url(folder):
        print(f"copy: {below(folder, directory.name)}")
    elif sentence := package_folder.warning(directory):
        print(sentence)
    if not records.finished:
        rounds = records.experiment["rounds"]
        print(f"stopped after {len(records.rounds)} of {rounds} rounds; go on with: rayfl resume {directory}")
    return records.finished


def _folder_of(run: Run) -> str:
    """The `output.directory` of a run; "" where its description, which its user may have edited, has none."""
    output = run.experiment.get("output")
    folder = output.get("directory") if isinstance(output, Mapping) else None
    return folder if isinstance(folder, str) else ""
