"""rayfl's part of the benchmark `rounds`: `python -m benchmarks.ours W1 2 30` plays 30 rounds on two actors.

Prints the times of the rounds after the warm-up, and the version, as JSON. `W1x10` registers every client ten times, so
that only the number of clients changes.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from actors.driver import play_on_ray
from actors.placement import place
from actors.session import session
from benchmarks.workloads import WORKLOADS
from rayfl.data.partition import Partition, Shards
from rayfl.determinism.platform import describe
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.population.sampling import Population
from rayfl.rounds.setup import Setup
from rayfl.run_directory.description import Description
from rayfl.run_directory.play_run import Listener, RunOutput
from rayfl.run_directory.run_folder import create_run_directory
from rayfl.version import __version__


def main(name: str, actors: int, rounds: int) -> None:
    """Run the workload and print its round times."""
    workload = replace(WORKLOADS[name], rounds=rounds)
    experiment = workload.experiment(actors=actors, num_cpus=1, object_store_memory_mb=1000)
    setup = registered(experiment, prepare(experiment), workload.copies)
    times: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = create_run_directory(Path(scratch) / name)
        Description(experiment.as_dict()).write(directory, describe(1))
        with session(experiment.runtime):
            placement = place(experiment.runtime, most_calls=setup.most_actors)
            output = RunOutput(directory, experiment.output.save_models, experiment.output.track, experiment.checkpoint)
            listener = Listener(lambda row, means: times.append(row.wall_s))
            play_on_ray(lambda: setup, placement, None, output, listener)
    print(json.dumps({"seconds": times[workload.warmup :], "version": __version__}), flush=True)


def registered(experiment: Experiment, setup: Setup, copies: int) -> Setup:
    """The setup with every client registered `copies` times."""
    if copies == 1:
        return setup
    clients = experiment.clients.model_copy(update={"count": experiment.clients.count * copies})
    train, test = repeated(setup.partition.train, copies), repeated(setup.partition.test, copies)
    none = Shards.empty(clients.count)
    population = Population(clients, experiment.seed, train.sizes)
    return replace(setup, partition=Partition(train, none, none, test), population=population)


def repeated(shards: Shards, copies: int) -> Shards:
    """The same shards `copies` times, one after another."""
    sizes = np.tile(np.diff(shards.offsets), copies)
    return Shards(np.tile(shards.indices, copies), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
