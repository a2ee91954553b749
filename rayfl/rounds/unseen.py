"""Judges the clients that no round asks (`clients.unseen`) as clients that come for the first time.

`Method.newcomer` says what the method does for such a client; nothing of that is kept, sent or billed. Metrics have the
names of evaluation.py with "unseen" in place of "own": `unseen/accuracy` is to an unseen client what `own/accuracy` is
to the others, and `unseen_after_training/accuracy` is the same right after the local work of its first round. Where the
client adapts the global model or trains one of its own, `unseen_before_adapting/accuracy` is the global model as it
comes, on the same test splits.
"""

from rayfl import tree
from rayfl.determinism.seeding import NOBODY
from rayfl.rounds import downlinks, evaluation
from rayfl.rounds.model_sums import ModelSums
from rayfl.rounds.running_round import Round
from rayfl.rounds.worker_jobs import EvaluateJob


def evaluate_unseen(round: Round, pooled: ModelSums | None) -> None:
    """Evaluate the unseen clients, on the workers where each has a model of its own.

    `pooled`: what the global model gave on the pooled test set, None without a global model.
    """
    setup, plan, server = round.setup, round.inputs.plan, round.run_state.server
    takes_a_round = setup.method.for_newcomers() == "round"
    one_by_one = takes_a_round or setup.is_peer or bool(setup.method.eval_stages(round.number))
    where = "unseen_before_adapting" if one_by_one else "unseen"
    if pooled is not None and setup.method.has_global_model:
        round.ledger.add(evaluation.own_splits(setup, pooled, setup.unseen, where))
    if not one_by_one:
        return
    if takes_a_round:
        ctx, downlink = setup.context(round.number, plan, NOBODY, "newcomers"), round.run_state.downlink
        message, _ = downlinks.broadcast(setup, server, downlink, ctx) if plan.down else ({}, {})
        personal = tree.to_arrays(server) if setup.server_half.overrides("personal_message") else None
        round.change_inputs(message=message, server=personal)
    for answer in round.run(round.client_jobs(EvaluateJob, setup.unseen, setup.state_slots)):
        round.ledger.add(answer.result)
