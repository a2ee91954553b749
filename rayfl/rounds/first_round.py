"""The first round of a client that nobody asks, for its evaluation: download and local work; it sends nothing."""

from rayfl import tree
from rayfl.data.transfer import to_device
from rayfl.population.fate import Fate
from rayfl.rounds.client_round import ClientRound
from rayfl.rounds.engines import run_loop
from rayfl.rounds.setup import Setup
from rayfl.rounds.uplink_memory import without_memory
from rayfl.rounds.worker_jobs import ClientResult, RoundInputs
from rayfl.tree import State


def takes_a_round(setup: Setup, client: int) -> bool:
    """Whether a client does the local work of a round before it is judged."""
    return client in setup.unseen and setup.method.for_newcomers() == "round"


def first_round(setup: Setup, inputs: RoundInputs, client: int, state: State) -> tuple[State, ClientResult]:
    """A client's state after the local work of its first round, whose first state is `state`, and how its model was
    judged right after that work.

    It downloads what `inputs` have, and sends nothing. Clients are trained one after another.
    """
    message = setup.for_hooks({name: packet.opened() for name, packet in inputs.message.items()})
    server = None if inputs.server is None else tree.to_tensors(inputs.server)
    memory = setup.first_server_memory(client) if setup.has_server_memory else {}
    if setup.hooks_on_device:
        state = to_device(state, setup.device)
    one = ClientRound(setup, inputs, message, server, client, Fate.NOT_SELECTED, state, memory)
    if one.has_work:
        ((carry, work),) = run_loop(setup.method, [one.local_task()])
        result, kept = one.finish(carry, work)
    else:
        result, kept = one.idle()
    metrics = {name: value for name, value in result.metrics.items() if name.startswith("unseen")}
    judged = ClientResult(client, metrics=metrics, sums=result.sums)
    return without_memory(tree.to_tensors(kept.state))[0], judged
