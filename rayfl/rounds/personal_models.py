"""The clients' models at the end of a run."""

from collections.abc import Iterator

from rayfl import tree
from rayfl.rounds.executor import Executor
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.rounds import naming_round, ship_model
from rayfl.rounds.run_state import RunState
from rayfl.rounds.running_round import Round
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import PersonalModelJob, RoundInputs
from rayfl.tree import Tree

AT_ONCE = 4
"""Models that a worker makes before they are taken, since all together can be larger than memory."""


def personal_models(setup: Setup, executor: Executor, run_state: RunState) -> Iterator[tuple[int, Tree]]:
    """Yield each client and its model at the end of a run, a few at a time.

    A client that keeps a model of its own and was never selected is left out.
    """
    number = setup.rounds - 1
    inputs = RoundInputs(number, setup.plan(number))
    round = Round(setup, executor, run_state, inputs, Ledger(setup.population.sample_round(number)))
    keeps_own = setup.method.personalized and setup.stateful
    with naming_round(number):
        ship_model(round)
        round.change_inputs(server=None if setup.is_peer else tree.to_arrays(run_state.server))
        clients = sorted(run_state.states) if keeps_own else range(setup.num_clients)
        width = AT_ONCE * executor.num_workers
        for first in range(0, len(clients), width):
            jobs = round.client_jobs(PersonalModelJob, clients[first : first + width], setup.state_slots, 1)
            for job, made in zip(jobs, round.run(jobs), strict=True):
                for client, model in zip(job.work.clients, made.outputs, strict=True):
                    yield client, tree.to_tensors(executor.get(model))
