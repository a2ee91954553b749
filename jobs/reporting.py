"""The commands about runs that are there: `report`, `compare`, `table`, `ls`, `show`, `prune`, `pack` and `note`.

Nothing here loads torch or Ray.
"""

import io
import json
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from jobs.arguments import report_options
from jobs.display import Display, line_width, print_table, say
from rayfl import toml
from rayfl.errors import RayflError
from rayfl.experiment.report_options import ReportOptions, agreed_options
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.groups import group_runs
from rayfl.report.summary import (
    Summary,
    TextTable,
    comparison,
    over_clients,
    require,
    run_list,
    runs_below,
    state_of,
    summary,
)
from rayfl.run_directory.description import Notes, is_run, read_notes, write_notes
from rayfl.run_directory.disk import CHECKPOINTS, locked, writing
from rayfl.run_directory.record import Run, read_refused, read_run, run_directories
from rayfl.run_directory.run_files import OutputKind, own_files, require_no_links, write_output
from rayfl.run_directory.run_folder import LOCAL, copy_for_reading
from rayfl.settings import dotted
from rayfl.untyped import Value

WIDTH = 150
"""Letters of a line in which a comparison is printed."""
_TEXTS = {".json", ".toml", ".html"}
"""Endings of the files in which paths of this machine are replaced."""
_LEFT_OUT = (f"{CHECKPOINTS}/", "tensorboard/", "wandb/")
"""What is not packed: states of unfinished work, and files of trackers, which have names of users and machines."""


def report(
    directories: Sequence[Path | str],
    output: Path | None,
    figures: Path | None,
    overwrite: bool,
    as_json: bool,
    **options: Value,
) -> None:
    """Write a page about runs, and print its tables and its path; `as_json`: print their numbers as JSON instead.

    figures: a folder for the page's figures and tables as files.
    """
    runs = _runs(directories)
    if as_json:
        numbers = json.dumps([summary(run) for run in runs])
        # JSON has no infinity and no NaN.
        say(json.dumps(json.loads(numbers, parse_constant=lambda name: None), indent=2))
        return
    agreed = _agreed(runs, options)
    if len(runs) == 1 and any(options[axis] for axis in ("rows", "columns", "baseline")):
        raise RayflError("--rows, --columns and --baseline compare several runs; use: rayfl table")
    # The folder of the one run or sweep, else the working directory.
    here = directories[0] if len(directories) == 1 and isinstance(directories[0], Path) else Path().absolute()
    path = output or here / ("report.html" if len(runs) == 1 else "comparison.html")
    with Display("drawing the page"):
        from rayfl.report import page

        if figures is not None:
            page.write_figures(runs, figures, agreed, overwrite)
        page.report([run.directory for run in runs], path, agreed, overwrite)
    if len(runs) > 1:
        print_comparison(runs, agreed)
    else:
        print_table(result_table(summary(runs[0])), 100)
    say(f"report: {path}" + f"\nfigures: {figures}" * (figures is not None))


def table(
    directories: Sequence[Path | str], written: str | None, output: Path | None, overwrite: bool, **options: Value
) -> None:
    """Print tables by swept settings, or write them to `output`. written: "text", "csv", "md" or "latex"; by default
    what the ending of `output` says, else text."""
    from rayfl.report.pivot import REFUSED, Pivot, pivots

    runs = _runs(directories)
    tables = pivots(group_runs(runs), _agreed(runs, options, ("rows", "columns", "baseline", "values")))
    if not tables:
        raise RayflError("no table fits the sweep by itself: name its --rows, and its --columns")
    ways = {"csv": Pivot.to_csv, "md": Pivot.to_markdown, "latex": Pivot.to_latex, "tex": Pivot.to_latex}
    write = ways.get(written or ("" if output is None else output.suffix.removeprefix(".")), str)
    content = "\n\n".join(write(table).rstrip() for table in tables)
    if write is str and (refused := read_refused(run.directory for run in runs)):
        content = "\n".join([content, "", *(f"{REFUSED}: {label}: {why}" for label, _, why in refused)])
    if output is not None:
        write_output(output, f"{content}\n".encode(), OutputKind("a table"), overwrite)
    say(content if output is None else f"table: {output}")


def compare(directories: Sequence[Path | str], **options: Value) -> None:
    """Print runs side by side."""
    runs = _runs(directories)
    print_comparison(runs, _agreed(runs, options))


def ls(folders: Sequence[Path], where: Sequence[str]) -> None:
    """Print a list of the runs in each folder, by default in runs/. where: KEY=VALUE, as of `run_list`."""
    if wrong := [word for word in where if "=" not in word]:
        raise RayflError(f"--where {wrong[0]}: write KEY=VALUE, as in state=finished, tag=paper or method.lr=0.1")
    for folder in folders or [LOCAL.absolute()]:
        if not folder.is_dir():
            raise RayflError(f"there is no folder {folder}; name the folder of your runs")
        with Display("reading the runs"):
            listing = run_list(folder, dict(word.split("=", 1) for word in where))
        if listing.rows:
            print_table(rich_table(listing), 120)
        such = " ".join(["", "with", *where]) if where else ""
        say(f"{wording.counted(len(listing.rows), 'run') if listing.rows else 'no runs'}{such} in {folder}")


def show(location: Path | str) -> None:
    """Print the experiment, the platform and the results of a run."""
    (run,) = _runs([location], whole_sweeps=False)
    say(description(run))
    print_table(result_table(summary(run)), 100)
    for text in over_clients(group_runs([run])):
        print_table(rich_table(text), 150)
    say(standing(run, location if isinstance(location, str) else None))


def _runs(locations: Sequence[Path | str], whole_sweeps: bool = True) -> list[Run]:
    """The runs in directories and, as temporary copies of what is read, at URLs.

    whole_sweeps: the directory of a sweep stands for all its runs.
    """
    with Display("reading the runs"):
        directories = [
            directory
            for location in locations
            for directory in (
                [copy_for_reading(location, ("checkpoints/", "models/global", "tensorboard/", "wandb/"))]
                if isinstance(location, str)
                else run_directories(location)
                if whole_sweeps
                else [location]
            )
        ]
        return [read_run(directory) for directory in directories]


def _agreed(
    runs: Sequence[Run], options: Mapping[str, Value], axes: Sequence[str] = ("rows", "columns", "baseline")
) -> ReportOptions:
    """The options for comparing runs, those of the command first (`report_options`). Raise RayflError for one that was
    given and fits none of the runs."""
    settings = report_options(options, axes)
    require(runs, agreed_options([], settings))
    return agreed_options([run.experiment for run in runs], settings)


def print_comparison(runs: Sequence[Run], options: ReportOptions) -> None:
    """Print runs side by side, the best first."""
    for table in comparison(runs, options):
        for part in parts(table, line_width(WIDTH)):
            print_table(rich_table(part), WIDTH)
        if table.note:
            say(table.note)


def parts(table: TextTable, width: int) -> list[TextTable]:
    """The table, or if it is wider than `width` letters, several ones: each has the first column, and some others."""
    columns = [*zip(table.heads, *table.rows, strict=True)]
    # Only heads may be broken between words; a border takes three letters.
    sizes = [3 + max(map(len, [*head.split(), *cells])) for head, *cells in columns]
    beside = width - min(sizes[0], width // 3)
    pieces, left = [columns[:1]], beside
    for column, size in zip(columns[1:], sizes[1:], strict=True):
        if size > left and len(pieces[-1]) > 1:
            pieces, left = [*pieces, columns[:1]], beside
        pieces[-1], left = [*pieces[-1], column], left - size
    return [table._replace(heads=heads, rows=rows) for heads, *rows in (zip(*part, strict=True) for part in pieces)]


_RESOURCES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "cpu_hours": ("CPU time, all processes", lambda hours: wording.seconds(3600 * hours)),
    "gpu_hours": ("GPU time, reserved", lambda hours: wording.seconds(3600 * hours)),
    "peak_bytes": ("peak memory of a process", lambda size: decimal(int(size))),
    "gpu_peak_bytes": ("peak GPU memory of a process", lambda size: decimal(int(size))),
    "gpu_kilowatt_hours": ("energy of the GPUs", lambda hours: f"{hours:.4g} kWh"),
}
"""The names and numbers of what a run used, as a table shows them."""


def result_table(numbers: Summary) -> Table:
    """The numbers of one run."""
    rows, used = [], numbers["resources"]
    for name, value in numbers["final"].items():
        best = numbers["best"][name]
        facts = Facts(title=name, unit=numbers["units"][name])
        rows += [
            [f"final {name}", facts.words(value, 2)],
            [f"best {name} (round {best['round']})", facts.words(best["value"], 2)],
        ]
    rows += [
        *([f"{name} of differential privacy", f"{value:.4g}"] for name, value in numbers["privacy"].items()),
        ["uplink, all clients", f"{numbers['uplink_megabytes']:.3f} MB"],
        ["downlink, all clients", f"{numbers['downlink_megabytes']:.3f} MB"],
        ["uplink per client per round", f"{numbers['uplink_kilobytes_per_client_round']:.2f} kB"],
        ["downlink per client per round", f"{numbers['downlink_kilobytes_per_client_round']:.2f} kB"],
        ["clients that worked per round", wording.amount(numbers["clients_per_round"])],
        ["steps per client per round", wording.amount(numbers["steps_per_client_round"])],
        ["examples per client per round", wording.amount(numbers["examples_per_client_round"])],
        ["updates delivered", f"{numbers['delivered']} of {numbers['selected']}"],
        ["simulated time", f"{numbers['simulated_s']:.1f} s"],
        ["real time", f"{numbers['wall_s']:.1f} s"],
        *([title, words(used[name])] for name, (title, words) in _RESOURCES.items() if used.get(name)),
        *([["ended early", numbers["early_stop"]]] if numbers["early_stop"] else []),
    ]
    # Tables, records and pages number rounds from 0; the progress counts rounds that are done.
    called = f", 0 to {numbers['rounds'] - 1}" if numbers["rounds"] > 1 else ""
    title = f"{numbers['name']}: {wording.counted(numbers['rounds'], 'round')}{called}"
    return rich_table(TextTable(["result", "value"], rows, title=title))


def description(run: Run) -> str:
    """The experiment of a run as TOML, and the platform that computed it."""
    platform = "\n".join(
        f"# {key}: {value}"
        for key, value in dotted(run.platform).items()
        if not key.startswith("variables.") and value not in (None, "")
    )
    return f"{toml.dumps(run.experiment)}\n# Computed with\n{platform or '# nothing yet'}"


def standing(run: Run, url: str | None) -> str:
    """The state of a run, its location, and the command that continues it or draws its page.

    `url`: where the run lies in object storage; `run.directory` is then a temporary copy.
    """
    directory = str(run.directory.absolute()) if url is None else shlex.quote(url)
    state = state_of(run) if url is None or run.finished else "unfinished"
    lines = [f"{state}: {len(run.rounds)} of {run.experiment.get('rounds')} rounds", f"run: {url or directory}"]
    if state != "running":
        is_finished = state == "finished"
        lines.append(f"{'draw its page: rayfl report' if is_finished else 'go on with: rayfl resume'} {directory}")
    return "\n".join(lines)


def rich_table(text: TextTable) -> Table:
    table = Table(title=text.title or None, title_justify="left")
    for index, head in enumerate(text.heads):
        table.add_column(Text(head), justify="right" if index else "left", overflow="fold")
    for row in text.rows:
        table.add_row(*map(Text, row))
    return table


def prune(folders: Sequence[Path], dry_run: bool) -> None:
    """Remove the checkpoints of the finished runs in folders, by default in runs/, and print the bytes of each run."""
    total = 0
    for directory in (run for folder in folders or [LOCAL.absolute()] for run in runs_below(folder)):
        checkpoints = directory / CHECKPOINTS
        if not checkpoints.is_dir() or checkpoints.is_symlink():
            continue
        run = read_run(directory, leave_out=("clients", "metrics"))
        if state_of(run) != "finished":
            say(f"{directory}: {state_of(run)}, its checkpoints stay")
            continue
        require_no_links(directory)
        # A file that has several links there counts once.
        sizes = {path.stat().st_ino: path.stat().st_size for path in checkpoints.rglob("*") if path.is_file()}
        if not dry_run:
            with locked(directory), writing(directory, "prune again"):
                shutil.rmtree(checkpoints)
        total += sum(sizes.values())
        say(f"{directory}: {decimal(sum(sizes.values()))}")
    say(f"{decimal(total)} {'would be freed: leave out --dry-run' if dry_run else 'freed'}")


def pack(directories: Sequence[Path], output: Path | None, overwrite: bool) -> None:
    """Write runs, or the runs of sweeps, to a .tar.gz file that can be shared: without checkpoints, files of trackers
    and the host, and with ~ in place of the user's home in paths.

    Raise RayflError if a run is still running, if there is none, or if the file exists.
    """
    target = output or Path(f"{directories[0].resolve().name}.tar.gz").absolute()
    runs = [run for directory in directories for run in runs_below(directory)]
    if not runs:
        raise RayflError(f"there is no run in {', '.join(map(str, directories))}; name the directory of a run or sweep")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for run in runs:
            if state_of(read_run(run, leave_out=("clients", "metrics"))) == "running":
                raise RayflError(f"{run} is running; pack it when it has ended")
            home = next(directory for directory in directories if run.is_relative_to(directory))
            for name in own_files(run):
                if not name.startswith(_LEFT_OUT):
                    # Neither the user's name nor their number: an entry made from a file would have both.
                    entry = tarfile.TarInfo(str(Path(home.resolve().name, run.relative_to(home), name)))
                    # The names of copies of input files follow from their content.
                    data = (run / name).read_bytes() if name.startswith("files/") else _shared(run / name)
                    entry.size, entry.mtime = len(data), int((run / name).stat().st_mtime)
                    archive.addfile(entry, io.BytesIO(data))
    write_output(target, content.getvalue(), OutputKind("an archive"), overwrite)
    packed = f"{wording.counted(len(runs), 'run')}, {decimal(content.tell())}"
    say(f"{target}: {packed}; unpack it with: tar xzf {target.name}")


def _shared(path: Path) -> bytes:
    """The content of a run's file, with ~ for the user's home and relative paths for those in the current folder."""
    if path.suffix not in _TEXTS:
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.name == "origin.json":
        text = json.dumps({name: value for name, value in json.loads(text).items() if name != "host"}, indent=2)
    for place, instead in ((f"{Path.cwd()}/", ""), (str(Path.home()), "~")):
        # JSON escapes letters that are not ASCII.
        for written in {place, json.dumps(place)[1:-1]} if len(place) > 1 else ():
            text = re.sub(rf"{re.escape(written)}(?![\w.-])" if instead else re.escape(written), instead, text)
    return text.encode()


def note(directory: Path, text: str | None, tags: Sequence[str], untagged: Sequence[str]) -> None:
    """Set the note of a run, add tags and remove some; print what it has."""
    if not is_run(directory):
        raise RayflError(f"{directory} is not a run directory; name the directory of a run")
    before = read_notes(directory)
    kept = tuple(tag for tag in dict.fromkeys([*before.tags, *tags]) if tag not in untagged)
    notes = Notes(note=before.note if text is None else text, tags=kept)
    if notes != before:
        with writing(directory, "give the note again"):
            write_notes(directory, notes)
    say(f"{directory}: {notes.note or 'no note'}; tags: {', '.join(notes.tags) or 'none'}")
