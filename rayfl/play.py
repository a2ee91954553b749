"""Play an experiment from its first round to its last into a run directory, over any executor."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rayfl import tree
from rayfl.executor import Executor
from rayfl.ledger import RoundRecord
from rayfl.record import Recorder, save_model
from rayfl.rounds import World, simulate
from rayfl.setup import Setup
from rayfl.tree import Tree


def play(
    setup: Setup, executor: Executor, directory: Path, on_round: Callable[[RoundRecord], None], save_models: bool = True
) -> World:
    """Run all rounds, record each, and save the final models. The records are readable whenever it is cut short."""
    with Recorder(directory) as recorder:

        def record_round(record: RoundRecord, world: World) -> None:
            recorder.round(record.row, record.clients, record.metrics)
            on_round(record)

        world = simulate(setup, executor, record_round)
        if save_models:
            for name, model in final_models(setup, executor, world).items():
                save_model(directory, name, model)
    return world


def final_models(setup: Setup, executor: Executor, world: World) -> Mapping[str, Tree]:
    """ "global": the server's model; "personal": every client's own one, under keys such as "12/fc.weight".

    A client that was never selected has no model of its own and is left out.
    """
    models: dict[str, Tree] = {}
    if not setup.is_peer and (model := setup.server_half.model(world.server)):
        models["global"] = model
    if setup.method.personalized:
        personal = {}
        for client, state in sorted(world.states.items()):
            outcome = setup.method.outcome(tree.to_tensors(executor.get(state)))
            personal |= tree.flatten({str(client): outcome})
        models["personal"] = personal
    return models
