"""`python -m benchmarks scale`: the tables' facts on a few clients, and spilled states that come back bit for bit."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import played, scale
from benchmarks.chaos import bits_different
from benchmarks.figures import Figures
from benchmarks.memory import Resident
from benchmarks.played import Played
from jobs.single import run
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.runtime import Runtime
from rayfl.run_directory import disk
from rayfl.run_directory.record import read_run

TINY = scale.Sizes(
    clients=(10,),
    actors=(1, 2),
    participants=5,
    rounds=8,
    keepers=10,
    keeping_rounds=20,
    spillers=8,
    spilling_rounds=2,
    checkpoint_rounds=6,
)


def cells(figures: Figures) -> list[list[str]]:
    """The rows of a table."""
    stream = io.StringIO()
    Console(file=stream, width=200).print(figures.table())
    rows = [line.strip("\u2502 ").split("\u2502") for line in stream.getvalue().splitlines() if "\u2502" in line]
    return [[cell.strip() for cell in row] for row in rows]


# 100 MB, and 2 MB more every round.
def made_up(watched: Sequence[int]) -> dict[int, Resident]:
    return {mark: Resident(actors=100 * scale.MB, rest=2 * mark * scale.MB) for mark in watched}


def on_digits(experiment: Experiment) -> Experiment:
    """The same on data that every machine has."""
    return Experiment(**{**experiment.as_dict(), "data": "digits", "model": {"name": "mlp", "hidden": [8]}})


def on_ray(experiment: Experiment, directory: Path, watched: Sequence[int]) -> tuple[Played, int]:
    """A `Measure` on the tests' cluster, with made-up memory."""
    result = played.play_and_watch(on_digits(experiment), directory, watched)
    assert set(result.resident) == set(result.stored) == set(watched)
    assert all(resident.rest > 0 for resident in result.resident.values())
    assert len(result.seconds) == experiment.rounds and len(result.between_s) == experiment.rounds - 1
    return replace(result, resident=made_up(watched)), 12_000_000


def inline(experiment: Experiment, directory: Path, watched: Sequence[int]) -> tuple[Played, int]:
    """A `Measure` in this process, with made-up figures: rounds of 6 s."""
    run(on_digits(experiment).model_copy(update={"runtime": Runtime(executor="inline")}), directory)
    rounds, stored = experiment.rounds, dict.fromkeys(watched, 5 * scale.MB)
    return Played([6.0] * rounds, [7.0] * (rounds - 1), made_up(watched), stored), 0


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_every_number_of_clients_meets_every_number_of_actors(tmp_path: Path):
    rows = cells(scale.populations(on_ray, tmp_path, TINY))
    assert [row[:2] for row in rows] == [["10", "1"], ["10", "2"]]
    # From round 2 to round 8, 2 MB a round.
    assert [row[3:] for row in rows] == [["12", "+12.0"]] * 2
    assert bits_different(*(tmp_path / f"10 clients, {actors} actors" for actors in (1, 2))) == 0


def test_states_are_looked_at_early_and_late(tmp_path: Path):
    rows = cells(scale.states(inline, tmp_path, TINY))
    assert [row[:2] for row in rows] == [[m, str(r)] for m in ("scaffold", "fedpse") for r in (2, 10, 20)]
    for name, mark, seen, *memory in rows:
        clients = read_run(tmp_path / name).clients
        by_round = zip(clients["client"].to_pylist(), clients["round"].to_pylist(), strict=True)
        assert seen == str(len({client for client, round in by_round if round < int(mark)}))
        assert memory == ["0", "100", "5", "0", str(2 * int(mark))]


def test_saving_more_often_ends_in_the_same_checkpoint(tmp_path: Path):
    rows = cells(scale.checkpoints(inline, tmp_path, TINY))
    assert [row[0] for row in rows] == ["never", "10", "1"]
    runs = [tmp_path / f"a checkpoint every {every}" for every in (0, 10, 1)]
    assert [list(disk.checkpoints(each)) for each in runs] == [[], [6], [6, 5]]
    assert scale.ends_alike(runs[1], runs[2])


def test_the_share_of_saving_is_what_the_rounds_do_not_explain(tmp_path: Path):
    def measure(experiment: Experiment, directory: Path, watched: Sequence[int]) -> tuple[Played, int]:
        every = experiment.checkpoint.every
        # Rounds of 6 s and 1 s of records; a checkpoint takes 3 s. Of the first third nothing counts.
        took = [7.0 + (3.0 if every and done % every == 0 else 0.0) for done in range(2, 31)]
        return Played(seconds=[6.0] * 30, between_s=[99.0] * 9 + took[9:]), 0

    rows = cells(scale.checkpoints(measure, tmp_path, replace(TINY, checkpoint_rounds=30)))
    # Of 20 intervals, after rounds 11 to 30, two have a checkpoint at every = 10: 6 s of 146, and all at 1: 60 of 200.
    assert [row[1:4] for row in rows] == [
        ["7.000", f"{1 / 7:.1%}", "0.0%"],
        ["7.300", f"{26 / 146:.1%}", f"{6 / 146:.1%}"],
        ["10.000", f"{80 / 200:.1%}", f"{60 / 200:.1%}"],
    ]


def test_changed_states_are_found(tmp_path: Path):
    sizes = replace(TINY, small_store_mb=80)

    def measure(experiment: Experiment, directory: Path, watched: Sequence[int]) -> tuple[Played, int]:
        seed = int(directory.name == "store of 80 MB")
        run(experiment.model_copy(update={"seed": seed, "runtime": Runtime(executor="inline")}), directory)
        return Played(seconds=[0.0, 0.0]), 0

    figures = scale.spilling(measure, tmp_path, sizes)
    assert [row["same_bits"] for row in figures.rows] == [None, False] and cells(figures)[1][-1] == "OTHER BITS"


@pytest.mark.slow
@pytest.mark.ray
def test_spilled_states_come_back_bit_for_bit(tmp_path: Path):
    # About 60 states of 1.6 MB exist at the end, which is more than the store's 80 MB, and some were made twice.
    sizes = replace(TINY, spillers=100, spilling_rounds=3)
    chosen = scale.spilling_experiment(sizes, megabytes=80)
    result, peak = scale.measured(chosen, tmp_path / "spilled", (3,))
    assert result.spilled_bytes > 20 * scale.MB and result.restored_bytes > scale.MB
    assert scale.saved_bytes(tmp_path / "spilled") > 80 * scale.MB
    assert peak > result.resident[3].total / 2
    run(chosen.model_copy(update={"runtime": Runtime(executor="inline")}), tmp_path / "inline")
    assert scale.ends_alike(tmp_path / "inline", tmp_path / "spilled")
