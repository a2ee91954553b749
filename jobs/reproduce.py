"""`rayfl reproduce`: run a paper's sweeps one after another, and write the verdicts on its claims.

A paper is a folder with sweep files and claims.toml. Sweeps whose names begin with "tune-" chose the settings of the
others, and run only if --only names them.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pydantic import Field

from jobs.console import Audience
from jobs.display import Display, say
from jobs.failures import INTERRUPTED, LIMIT
from jobs.resuming import earlier_run
from jobs.shipped_experiments import FOLDER
from jobs.sweep import sweep
from rayfl.data.loading import keeping_datasets
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.sweep import Combination, combine
from rayfl.experiment.table import read_table, with_overrides
from rayfl.report.claims import Choices, Claim, assess, check, verdicts_markdown
from rayfl.report.groups import group_runs
from rayfl.report.page import write_figures
from rayfl.report.pivot import tables_or_problems
from rayfl.run_directory.description import origin
from rayfl.run_directory.disk import write_text, writing
from rayfl.run_directory.record import Run
from rayfl.settings import Settings, dotted
from rayfl.untyped import SettingsTable, Value

PAPERS = FOLDER / "reproduce"
CLAIMS = "claims.toml"
TUNING = "tune-"
"""The prefix of the names of sweeps that choose settings."""
Sweeps = Mapping[str, Sequence[Combination]]


class Paper(Settings):
    """The file claims.toml. quick: settings of all sweeps with --quick; a table named after a sweep is for it alone."""

    paper: str
    quick: dict[str, Value] = {}
    claim: tuple[Claim, ...] = Field(min_length=1)


def reproduce(
    name_or_folder: Path,
    overrides: Sequence[str],
    directory: Path | None,
    quick: bool,
    parallel: int,
    only: Sequence[str],
    began: float,
) -> int:
    """Run a paper's sweeps into `directory` and write the verdicts there after each one; return the exit code.

    Finished runs are not repeated. Raise RayflError before anything runs if the folder, a sweep or a claim is wrong.
    """
    with ExitStack() as opened:
        with Display(f"checking the sweeps of {name_or_folder}"):
            folder = paper_folder(name_or_folder)
            paper, sweeps = read_paper(folder, quick, overrides, only)
            # Kept until the end, so that the check of a finished run does not read them again.
            first = [sweeps[name][0].experiment.data for name in only or sweeps]
            opened.enter_context(keeping_datasets(first))
        home = directory or Path("runs", f"reproduce-{folder.name}{'-quick' * quick}").absolute()
        code = 0
        again = f"go on with: {origin(Path.cwd())['command']}"
        for name in only or sweeps:
            with Display(name) as display:
                audience = Audience(display=display, began=began)
                done = sweep(sweeps[name], home / name, parallel, False, audience, again)
            runs = _write(paper, sweeps, home, quick)[name]
            if runs:
                write_figures(runs, home / name / "figures", sweeps[name][0].experiment.report, overwrite=True)
            code = max(code, done)
            if done in (INTERRUPTED, LIMIT):
                return done
    what = "the differences, without verdicts on the paper," if quick else "the verdicts"
    say(f"{what} are in {home / 'verdicts.md'}")
    return code


def paper_folder(name_or_folder: Path) -> Path:
    """The folder of a paper: a shipped one by its name, or the user's own. Raise RayflError without claims.toml."""
    folder = name_or_folder if (name_or_folder / CLAIMS).is_file() else PAPERS / name_or_folder
    if not (folder / CLAIMS).is_file():
        words = did_you_mean(str(name_or_folder), [path.parent.name for path in PAPERS.glob(f"*/{CLAIMS}")])
        raise RayflError(f"there is no paper {name_or_folder} and no folder of that name with {CLAIMS}: {words}")
    return folder.absolute()


def read_paper(
    folder: Path, quick: bool = False, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> tuple[Paper, Sweeps]:
    """Read claims.toml and the sweeps of a folder. Raise RayflError if one is wrong, or if they do not fit together.

    With `only`, claims about other sweeps are not checked, because `overrides` may fix a setting that those sweep.
    """
    table = {key: value for key, value in read_table(folder / CLAIMS).items() if (key, value) != ("name", "claims")}
    try:
        paper = Paper(**table)
    except RayflError as error:
        raise RayflError(f"{folder / CLAIMS}: {error}") from None
    files = {path.stem: path for path in sorted(folder.glob("*.toml")) if path.name != CLAIMS}
    for name in only:
        if name not in files:
            raise RayflError(f"--only {name}: {folder.name} has no sweep of that name; {did_you_mean(name, files)}")
    shared = {key: value for key, value in paper.quick.items() if key not in files}
    sweeps = {
        name: _combinations(file, dotted(shared) | dotted(paper.quick.get(name, {})) if quick else {}, overrides)
        for name, file in files.items()
        if name in only or not name.startswith(TUNING)
    }
    for claim in (claim for claim in paper.claim if not only or claim.sweep in only):
        check(claim, {name: [*map(_choices, combinations)] for name, combinations in sweeps.items()})
    return paper, sweeps


def _choices(combination: Combination) -> Choices:
    return {**combination.experiment.swept, "seed": str(combination.experiment.seed)}


def _combinations(file: Path, changes: SettingsTable, overrides: Sequence[str]) -> list[Combination]:
    """The combinations of a sweep file, after `changes`, and then the user's overrides."""
    table, lists = with_overrides(read_table(file), (), changes)
    if lists is None:
        raise RayflError(f"{file} has no [sweep] table, which a paper's files need")
    table, lists = with_overrides({**table, "sweep": lists}, overrides)
    return combine(table, lists or {}, overrides)


def _write(paper: Paper, sweeps: Sweeps, home: Path, quick: bool) -> Mapping[str, Sequence[Run]]:
    """Write the verdicts and tables of all runs that have finished below `home`; return the runs of each sweep."""
    runs_by_choices = {
        name: [
            (_choices(combination), _finished(home / name / combination.directory, combination))
            for combination in combinations
        ]
        for name, combinations in sweeps.items()
    }
    finished = {name: [run for _, run in some if run is not None] for name, some in runs_by_choices.items()}
    verdicts = assess(paper.claim, runs_by_choices)
    if quick:
        verdicts.loc[verdicts["verdict"] != "not run", "verdict"] = "no verdict"
    title = f"{paper.paper}{' (quick: no verdict on the paper)' * quick}"
    runs = [run for some in finished.values() for run in some]
    planned = sum(map(len, sweeps.values()))
    text = verdicts_markdown(title, paper.claim, verdicts, origin(Path.cwd()), runs, planned)
    shown = {
        name: tables_or_problems(group_runs(some), sweeps[name][0].experiment.report)
        for name, some in finished.items()
        if len(some) == len(sweeps[name])
    }
    parts = [
        *(
            f"\n## {name}: {table.title}\n\n{table.note}\n\n{table.to_markdown()}"
            for name, (tables, _) in shown.items()
            for table in tables
        ),
        *(f"\n## {name}\n\n{problem}\n" for name, (_, problems) in shown.items() for problem in problems),
    ]
    with writing(home, f"give --dir {home} again"):
        write_text(home / "verdicts.md", text + "".join(parts))
        write_text(home / "verdicts.csv", verdicts.to_csv(index=False))
    return finished


def _finished(directory: Path, combination: Combination) -> Run | None:
    # A sweep that --only leaves out may have runs of other settings.
    with suppress(RayflError):
        run = earlier_run(directory, combination.experiment)
        return run if run is not None and run.finished else None
