"""Ray's worker processes load torch before they become client actors, while the coordinator loads it, too.

Without this, processes start one after another: the coordinator's, which loads torch, and only then those of the actors
that it asks for. An actor takes over an idle process of the same job, and finds there what a task has loaded.
"""

import ray

from actors.placement import Placement
from rayfl.determinism.process import InstructionSet, prepare_process


@ray.remote(max_retries=0)
def load(instruction_set: InstructionSet) -> None:
    """Prepare this process as a client actor does, and load what it will need."""
    prepare_process(instruction_set)
    import rayfl.rounds.worker  # noqa: F401


def begin(placement: Placement) -> None:
    """Have as many processes load torch as there will be actors; nobody waits for them.

    Each asks for what an actor asks for, so that no actor starts in another process meanwhile. Only in a Ray of our own
    and without GPUs: elsewhere these processes may start where no actor comes, or wait for room that an actor needs.
    """
    if placement.num_gpus or placement.most is not None:
        return
    for _ in range(placement.num_actors):
        load.options(num_cpus=placement.num_cpus).remote(placement.instruction_set)
