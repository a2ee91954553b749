"""The benchmark `fuzz`: random experiments, each played in many ways that must all give the same bits."""

import re
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rayfl.determinism.process import prepare_process

prepare_process()

from benchmarks import fuzz_plays  # noqa: E402
from benchmarks.figures import Column, Figures, Results  # noqa: E402
from benchmarks.fuzz_choices import LATEST  # noqa: E402
from benchmarks.fuzz_elsewhere import elsewhere  # noqa: E402
from benchmarks.fuzz_experiments import Drawn, Draws, Tables, drawn, named  # noqa: E402
from benchmarks.fuzz_plays import PLAYS, Difference, Play, Played, differing  # noqa: E402
from rayfl import toml  # noqa: E402
from rayfl.errors import ClientError, RayflError  # noqa: E402

CALM = "calm"
"""The play to which all others are compared."""
COLUMNS = (
    Column("name", "experiment"),
    Column("method", "method"),
    Column("additions", "additions"),
    Column("plays", "plays"),
    Column("strikes", "strikes"),
    Column("found", "found"),
    Column("toml"),
    Column("seconds", "seconds", "{:.1f}"),
)
MOST = 100_000
"""Seeds that one call takes at most."""


class Found(NamedTuple):
    """What came of one experiment: how many plays agree, processes killed, and what differs. `late`: sentences of
    refusals that came only after the start, for which an addition was left out."""

    name: str
    tables: Tables
    words: str
    plays: int = 0
    strikes: int = 0
    difference: Difference | None = None
    late: tuple[str, ...] = ()


def bench_fuzz(
    seeds: str,
    results: Results,
    *,
    version: int | None = None,
    on_ray: bool = False,
    file: Path | None = None,
    limit_s: float | None = None,
    alone: bool = False,
) -> int:
    """Play the experiments of the seeds, or the one in `file`; print a line for each. 1 if any bit differs.

    alone: play nothing in another process. limit_s: seconds after which no further experiment begins. Raise RayflError
    for wrong options.
    """
    version = LATEST if version is None else version
    if not 1 <= version <= LATEST:
        raise RayflError(f"--generator {version} is not allowed; the versions are 1 to {LATEST}")
    wanted = [file] if file is not None else parsed(seeds)
    results.require()
    begun, figures, wrong = time.monotonic(), Figures("experiments", COLUMNS), list[Found]()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz"))
        plays = entered(stack, on_ray, alone)
        for number, seed in enumerate(wanted):
            if limit_s is not None and time.monotonic() - begun > limit_s:
                print(f"{len(wanted) - number} experiments are left after {limit_s:g} s", flush=True)
                break
            started, home = time.monotonic(), Path(scratch) / str(number)
            home.mkdir()
            finding = tried(seed, version, home, plays)
            seconds = time.monotonic() - started
            text = toml.dumps(finding.tables) if finding.difference else ""
            shown = "" if finding.difference is None else f"{finding.difference.play}: {finding.difference.words}"
            method = finding.tables.get("method", {}).get("name", "")
            figures.add(finding.name, method, finding.words, finding.plays, finding.strikes, shown, text, seconds)
            told(finding, seconds, version, on_ray)
            wrong += [finding] if finding.difference else []
    results.write(figures, generator=version, on_ray=on_ray, seconds=round(time.monotonic() - begun, 1))
    total = [sum(row[name] for row in figures.rows) for name in ("plays", "strikes")]
    struck = f", {total[1]} processes killed" if on_ray else ""
    print(f"{len(figures.rows)} experiments, {total[0]} plays{struck}, {len(wrong)} with another bit or an error")
    return int(bool(wrong))


def parsed(seeds: str) -> list[str]:
    """The seeds and names that `--seeds` gives: 1-20, 7, 17.3f, or several with commas. Raise RayflError otherwise."""
    names = list[str]()
    for part in seeds.split(","):
        match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", part)
        if match and 0 <= int(match[2]) - int(match[1]) < MOST:
            names += map(str, range(int(match[1]), int(match[2]) + 1))
        elif re.fullmatch(r"[0-9]{1,9}(\.[0-9a-f]{1,40})?", part):
            names.append(part)
        else:
            raise RayflError(
                f"--seeds {part} is not allowed; give a range of at most {MOST} as 1-20, one as 17, or a name as 17.3f"
            )
    return names


def entered(stack: ExitStack, on_ray: bool, alone: bool) -> Mapping[str, Play]:
    """The ways to play, by name; none on Ray, where there is one of its own. What they need ends with `stack`."""
    if on_ray:
        from benchmarks.fuzz_on_ray import one_ray

        stack.enter_context(one_ray())
        return {}
    return PLAYS if alone else {**PLAYS, "another process": stack.enter_context(elsewhere())}


def tried(seed: str | Path, version: int, home: Path, plays: Mapping[str, Play]) -> Found:
    """Play the experiment of a seed, with a name, or in a file."""
    if isinstance(seed, Path):
        tables = tomllib.loads(seed.read_text(encoding="utf-8"))
        return played(Found(str(seed), tables, ""), home, plays)
    late, draws, finding = list[str](), Draws(int(seed.partition(".")[0]), version), Found(seed, {}, "")
    try:
        experiment = named(seed, version) if "." in seed else drawn(draws)
    except RayflError:
        raise
    except Exception as error:  # noqa: BLE001 (the finding)
        return Found(seed, Drawn(draws, (), {}).tables, "", difference=Difference("the check", told_error(error)))
    for less in lessened(experiment):
        finding = played(Found(less.name, less.tables, less.words, late=tuple(late)), home, plays)
        if finding.difference is None or finding.difference.play != CALM or "." in seed:
            return finding
        late += [finding.difference.words] if finding.difference.words not in late else []
    return finding


def lessened(experiment: Drawn) -> Iterator[Drawn]:
    """The experiment, then without one of its additions, then without any."""
    yield experiment
    yield from (
        experiment.keeping([*experiment.kept[:at], *experiment.kept[at + 1 :]])
        for at in reversed(range(len(experiment.kept)))
    )
    yield experiment.keeping([])


def played(finding: Found, home: Path, plays: Mapping[str, Play]) -> Found:
    """Play an experiment calmly, then in the other ways until one differs; then look for a smaller experiment."""
    try:
        run = fuzz_plays.calm(finding.tables, home)
    except (RayflError, ClientError) as error:
        return finding._replace(difference=Difference(CALM, told_error(error)))
    except Exception as error:  # noqa: BLE001 (the finding)
        return finding._replace(difference=Difference("an error", told_error(error)))
    if not plays:
        from benchmarks.fuzz_on_ray import struck

        differs, strikes = struck(run, home / "struck")
        return finding._replace(plays=1 + (differs is None), strikes=strikes, difference=differs)
    for number, (name, play) in enumerate(plays.items()):
        if differs := differing(run, name, play, home):
            smaller, differs = shrunk(run, differs, play, home)
            return finding._replace(plays=1 + number, difference=differs, tables=smaller)
    return finding._replace(plays=1 + len(plays))


def shrunk(run: Played, differs: Difference, play: Play, home: Path) -> tuple[Tables, Difference]:
    """The tables without all that the difference does not need: whole tables, and settings of tables."""
    tables, number = run.tables, 0
    for path in [(table,) for table in tables] + [(table, key) for table in tables for key in within(tables[table])]:
        smaller = without(tables, path)
        if smaller is None:
            continue
        number += 1
        place = home / f"smaller-{number}"
        place.mkdir()
        try:
            again = differing(fuzz_plays.calm(smaller, place), differs.play, play, place)
        except Exception:  # noqa: BLE001 (it needs what was taken away)
            continue
        if again:
            tables, differs = smaller, again
    return tables, differs


def within(table: object) -> Sequence[str]:
    """The keys of a table."""
    return list(table) if isinstance(table, dict) else []


def without(tables: Tables, path: Sequence[str]) -> Tables | None:
    """The tables without a setting; None if it is not there."""
    table = path[0]
    if table not in tables:
        return None
    if len(path) == 1:
        return {name: value for name, value in tables.items() if name != table}
    if path[1] not in within(tables[table]):
        return None
    return {**tables, table: {name: value for name, value in tables[table].items() if name != path[1]}}


def told_error(error: BaseException) -> str:
    """An error in words."""
    return f"{type(error).__name__}: {error}"


def told(finding: Found, seconds: float, version: int, on_ray: bool) -> None:
    """Print the line of an experiment; what differs, how to repeat it, and its TOML."""
    method = finding.tables.get("method", {}).get("name", "")
    strikes = f", {finding.strikes} killed" if on_ray else ""
    print(f"{finding.name} {method}: {finding.plays} plays{strikes}, {seconds:.1f} s; {finding.words}", flush=True)
    for sentence in finding.late:
        print(f"  refused only after the start, so an addition was left out: {sentence}")
    if finding.difference is None:
        return
    generator = "" if version == LATEST else f" --generator {version}"
    again = f"--file {finding.name}" if "/" in finding.name else f"--seeds {finding.name}{generator}"
    print(f"  DIFFERENT, {finding.difference.play}: {finding.difference.words}")
    print(f"  again: python -m benchmarks fuzz {again}{' --ray' if on_ray else ''}")
    print("  smaller, for --file:" if not on_ray else "  experiment:")
    print("".join(f"    {line}\n" for line in toml.dumps(finding.tables).splitlines()), flush=True)
