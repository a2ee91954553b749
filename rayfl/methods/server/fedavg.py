"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1.

Clients send the model difference instead of the model, which is the same average and can be compressed.
"""

from rayfl.methods.base import (
    Capabilities,
    Context,
    Finished,
    FinishedStack,
    ModelServer,
    ModelState,
    Received,
    StackRows,
    State,
    WeightedMean,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry


class FedAvg(GradientMethod, ModelServer):
    """Client: local steps from the received model x. Up: delta_i = x - x_i, with x_i the trained model.

    Server: x <- x - sum_i p_i delta_i with p_i by examples or uniform.
    """

    paper = "McMahan et al., AISTATS 2017"
    capabilities = Capabilities(
        on_device=True, server_on_device=True, whole_stacks=True, keeps_parts=True, takes_stale=True
    )
    gather = {"delta": WeightedMean()}
    difference = "delta"

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        return self.finished(state, {"delta": self.delta(carry)}, carry, ctx)

    def finish_stack(self, states: State, carry: LocalCarry, rows: StackRows, ctx: Context) -> FinishedStack:
        return self.finished_stack(states, {"delta": self.delta(carry)}, carry, rows)

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        return {"params": received["delta"].taken_from(server["params"])}
