"""`rayfl reproduce`: run a paper's sweeps one after another, and write the verdicts on its claims.

A paper is a folder with sweep files and claims.toml. Sweeps whose names begin with "tune-" chose the settings of the
others, and run only if --only names them.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path

from pydantic import Field
from rich.table import Table

from jobs.console import Audience
from jobs.display import Display, print_table, say
from jobs.failures import INTERRUPTED, LIMIT
from jobs.resuming import earlier_run
from jobs.shipped_experiments import FOLDER
from jobs.sweep import sweep
from rayfl.data.loading import keeping_datasets
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.identity import determining_settings
from rayfl.experiment.sweep import Combination, combine
from rayfl.experiment.table import read_table, with_overrides
from rayfl.report.claims import Choices, Claim, check, check_distinct, read_pairs
from rayfl.report.groups import group_runs
from rayfl.report.page import write_figures
from rayfl.report.pivot import tables_or_problems
from rayfl.report.verdicts import (
    SHORT,
    ClaimRows,
    counted,
    decide,
    estimates,
    short_rows,
    verdicts_markdown,
)
from rayfl.run_directory.description import origin
from rayfl.run_directory.disk import write_text, writing
from rayfl.run_directory.record import Run
from rayfl.settings import Settings, dotted
from rayfl.untyped import SettingsTable, Value

PAPERS = FOLDER / "reproduce"
CLAIMS = "claims.toml"
FROZEN = "claims.sha256"
"""The file with the hash of the claims on which a directory has verdicts."""
TUNING = "tune-"
"""The prefix of the names of sweeps that choose settings."""
Sweeps = Mapping[str, Sequence[Combination]]


class Paper(Settings):
    """The file claims.toml.

    written: the day on which the claims were fixed, before the runs; changes: what was changed since, and when.
    smallest: the smallest effect that matters, by unit, as `verdicts.ClaimRows` has it. quick: settings of all sweeps
    with --quick; a table named after a sweep is for it alone.
    """

    paper: str
    written: date
    changes: tuple[str, ...] = ()
    smallest: dict[str, float] = {}
    quick: dict[str, Value] = {}
    claim: tuple[Claim, ...] = Field(min_length=1)

    @property
    def rows(self) -> ClaimRows:
        """The claims with the smallest effects."""
        return ClaimRows(self.claim, self.smallest)


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
            opened.enter_context(keeping_datasets([sweeps[name][0].experiment.data for name in only or sweeps]))
        home = directory or Path("runs", f"reproduce-{folder.name}{'-quick' * quick}").absolute()
        _check_frozen(paper, home)
        code = 0
        again = f"go on with: {origin(Path.cwd())['command']}"
        for name in only or sweeps:
            with Display(name) as display:
                done = sweep(sweeps[name], home / name, parallel, False, Audience(display=display, began=began), again)
            runs, shown = _write(paper, sweeps, home, quick, name)
            if runs:
                write_figures(runs, home / name / "figures", sweeps[name][0].experiment.report, overwrite=True)
            code = max(code, done)
            if done in (INTERRUPTED, LIMIT):
                return done
    print_table(shown, 140)
    say(f"the {'differences, without verdicts on the paper,' if quick else 'verdicts'} are in {home / 'verdicts.md'}")
    return code


def paper_folder(name_or_folder: Path) -> Path:
    """The folder of a paper: a shipped one by its name, or the user's own. Raise RayflError without claims.toml."""
    folder = name_or_folder if (name_or_folder / CLAIMS).is_file() else PAPERS / name_or_folder
    if not (folder / CLAIMS).is_file():
        papers = [path.parent.name for path in PAPERS.glob(f"*/{CLAIMS}")]
        raise RayflError(
            f"there is no paper {name_or_folder} and no folder of that name with {CLAIMS}: "
            f"{did_you_mean(str(name_or_folder), papers)}"
        )
    return folder.absolute()


def read_claims(folder: Path) -> Paper:
    """Read claims.toml of a folder. Raise RayflError if it is wrong."""
    table = {key: value for key, value in read_table(folder / CLAIMS).items() if (key, value) != ("name", "claims")}
    try:
        return Paper(**table)
    except RayflError as error:
        raise RayflError(f"{folder / CLAIMS}: {error}") from None


def read_paper(
    folder: Path, quick: bool = False, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> tuple[Paper, Sweeps]:
    """Read claims.toml and the sweeps of a folder. Raise RayflError if one is wrong, or if they do not fit together.

    With `only`, claims about other sweeps are not checked, because `overrides` may fix a setting that those sweep.
    """
    paper = read_claims(folder)
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
    claims = [claim for claim in paper.claim if not only or claim.sweep in only]
    for claim in claims:
        check(claim, {name: [*map(_choices, combinations)] for name, combinations in sweeps.items()})
    needed = {claim.sweep for claim in claims}
    check_distinct(
        claims,
        {
            name: [(_choices(combination), _identity(combination)) for combination in combinations]
            for name, combinations in sweeps.items()
            if name in needed
        },
    )
    return paper, sweeps


def _identity(combination: Combination) -> str:
    """The seed and the settings that decide a run's numbers, in words."""
    experiment = combination.experiment
    return f"{experiment.seed} {sorted(determining_settings(experiment.model_dump(mode='json')).items())}"


def _check_frozen(paper: Paper, home: Path) -> None:
    """Raise RayflError if `home` has verdicts on other claims."""
    file = home / FROZEN
    if file.is_file() and (before := file.read_text(encoding="utf-8").strip()) != paper.rows.digest:
        raise RayflError(
            f"{home} has verdicts on claims with the hash {before}, and claims.toml has {paper.rows.digest} now: a "
            "claim that changes after its verdict starts anew; give another --dir, and in "
            '"sweep.seed=[...]" seeds that no run of these claims had'
        )


def _choices(combination: Combination) -> Choices:
    return {**combination.experiment.swept, "seed": str(combination.experiment.seed)}


def _combinations(file: Path, changes: SettingsTable, overrides: Sequence[str]) -> list[Combination]:
    """The combinations of a sweep file, after `changes`, and then the user's overrides."""
    table, lists = with_overrides(read_table(file), (), changes)
    if lists is None:
        raise RayflError(f"{file} has no [sweep] table, which a paper's files need")
    table, lists = with_overrides({**table, "sweep": lists}, overrides)
    return combine(table, lists or {}, overrides)


def _write(paper: Paper, sweeps: Sweeps, home: Path, quick: bool, name: str) -> tuple[Sequence[Run], Table]:
    """Write the verdicts and tables of all runs that have finished below `home`; return the runs of the sweep `name`,
    and the short table of the verdicts."""
    runs_by_choices = {
        name: [
            (_choices(combination), _finished(home / name / combination.directory, combination))
            for combination in combinations
        ]
        for name, combinations in sweeps.items()
    }
    finished = {name: [run for _, run in some if run is not None] for name, some in runs_by_choices.items()}
    pairs = read_pairs(paper.claim, runs_by_choices)
    verdicts = decide(paper.rows, estimates(paper.rows, pairs))
    if quick:
        verdicts.loc[verdicts["verdict"] != "not run", "verdict"] = "no verdict"
    title = f"{paper.paper}{' (quick: no verdict on the paper)' * quick}"
    runs = [run for some in finished.values() for run in some]
    from_where = origin(Path.cwd())
    about = [
        f"`{from_where['command']}`, commit {from_where.get('commit', 'unknown')}, {len(runs)} of "
        f"{sum(map(len, sweeps.values()))} runs. The claims were written on {paper.written}, hash {paper.rows.digest}.",
        *paper.changes,
    ]
    text = verdicts_markdown(title, paper.rows, verdicts, about, runs)
    with writing(home, f"give --dir {home} again"):
        write_text(home / "verdicts.md", text + _tables(sweeps, finished))
        write_text(home / "verdicts.csv", verdicts.drop(columns="moments").to_csv(index=False))
        write_text(home / "pairs.csv", pairs.to_csv(index=False))
        if not quick and runs:
            write_text(home / FROZEN, paper.rows.digest + "\n")
    shown = Table(*SHORT, title=f"{title}: {counted(verdicts)}")
    for row in short_rows(paper.rows, verdicts.loc[verdicts["verdict"] != "not run"]):
        shown.add_row(*row)
    return finished[name], shown


def _tables(sweeps: Sweeps, finished: Mapping[str, Sequence[Run]]) -> str:
    """The tables of each sweep whose runs have all finished, in Markdown."""
    shown = {
        name: tables_or_problems(group_runs(some), sweeps[name][0].experiment.report)
        for name, some in finished.items()
        if len(some) == len(sweeps[name])
    }
    tables = "".join(
        f"\n## {name}: {table.title}\n\n{table.note}\n\n{table.to_markdown()}"
        for name, (tables, _) in shown.items()
        for table in tables
    )
    return tables + "".join(
        f"\n## {name}\n\n{problem}\n" for name, (_, problems) in shown.items() for problem in problems
    )


def _finished(directory: Path, combination: Combination) -> Run | None:
    # A sweep that --only leaves out may have runs of other settings.
    with suppress(RayflError):
        run = earlier_run(directory, combination.experiment)
        return run if run is not None and run.finished else None
