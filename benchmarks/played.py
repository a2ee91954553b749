"""Play one run on its own Ray and watch it: `python -m benchmarks.played EXPERIMENT.json DIRECTORY ROUND...`.

Plays the experiment into DIRECTORY and prints as JSON how long its rounds took, how much memory its processes had at
each ROUND (counted from 1), and what the object store held and spilled.
"""

import json
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from actors import session
from actors.driver import play_on_ray
from actors.placement import place
from benchmarks.memory import Resident, resident
from benchmarks.store_use import store_use
from rayfl.determinism.platform import describe
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.play_run import Listener, RunOutput
from rayfl.run_directory.run_folder import create_run_directory

LOOKS = 5
"""The memory at a round is the least of this many measurements, one after each of the rounds before it, because the
memory of current work varies. It is not measured after the last round, when actors end."""


@dataclass
class Played:
    """A run's figures.

    `seconds`: the work of each round. `between_s`: from the end of a round to the end of the next, with everything that
    is written; single values are right to a tenth of a second, their sum is more precise. `resident`: the memory of
    Ray's and rayfl's processes, by round. `stored`: bytes in the object store, by round.
    """

    seconds: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    resident: dict[int, Resident] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    spilled_bytes: int = 0
    restored_bytes: int = 0


def play_and_watch(experiment: Experiment, directory: Path, watched: Collection[int] = ()) -> Played:
    """Play the experiment, and measure memory at the rounds `watched`. Errors: those of `play_on_ray`."""
    played = Played()
    marks: list[float] = []
    held = [prepare(experiment)]
    create_run_directory(directory)
    Description(experiment.as_dict()).write(directory, describe(1))

    def take_down(row: RoundRow, means: Mapping[str, float]) -> None:
        marks.append(time.perf_counter())
        played.seconds.append(row.wall_s)
        done = row.round + 1
        for mark in (mark for mark in watched if mark - LOOKS <= done < mark):
            look(played, mark)

    with session.session(experiment.runtime):
        placement = place(experiment.runtime, most_calls=held[0].most_actors)
        output = RunOutput(directory, experiment.output.save_models, experiment.output.track, experiment.checkpoint)
        play_on_ray(held.pop, placement, None, output, Listener(take_down))
        use = store_use()
    played.spilled_bytes, played.restored_bytes = use.spilled_bytes, use.restored_bytes
    played.between_s = [after - before for before, after in pairwise(marks)]
    return played


def look(played: Played, mark: int) -> None:
    """Record the memory in use now, if it is less than recorded for this mark before."""
    now, stored = resident(), store_use().used_bytes
    before = played.resident.get(mark, now)
    played.resident[mark] = Resident(*(min(pair) for pair in zip(before, now, strict=True)))
    played.stored[mark] = min(stored, played.stored.get(mark, stored))


def from_json(text: str) -> Played:
    """The figures that `main` printed."""
    table = json.loads(text)
    table["resident"] = {int(mark): Resident(*values) for mark, values in table["resident"].items()}
    table["stored"] = {int(mark): value for mark, value in table["stored"].items()}
    return Played(**table)


def main(file: str, directory: str, *watched: str) -> None:
    """Play the experiment in a file and print its figures."""
    experiment = Experiment(**json.loads(Path(file).read_text(encoding="utf-8")))
    print(json.dumps(asdict(play_and_watch(experiment, Path(directory), [int(mark) for mark in watched]))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
