"""FedNova: Wang, Liu, Liang, Joshi, Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020, equations (7) and (11), with local SGD and its momentum (their section 4).

Clients that take more steps than others pull FedAvg's model towards themselves. FedNova averages normalised changes:
x_i - x is -eta sum_k a_i,k g_i,k, where eta a_i,k is the weight of step k's gradient in the model after the last step.
So d_i = (x - x_i) / |a_i|_1 is eta times a weighted mean of gradients, for any number of steps tau_i. The server takes
x <- x - tau_eff sum_i p_i d_i with tau_eff = sum_i p_i |a_i|_1 (theirs, the step that FedAvg would have taken).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import model_validator

from rayfl import tree
from rayfl.compress.scalar import scalar_packet
from rayfl.methods.base import (
    Aggregate,
    Context,
    Finished,
    Gather,
    Metrics,
    ModelState,
    RayflError,
    State,
    WeightedMean,
)
from rayfl.methods.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining


class FedNova(FedAvg):
    """FedAvg in which each client divides its change by |a_i|_1, the norm of its step weights."""

    class Hyper(LocalTraining):
        """The settings of local training, whose optimizer must be sgd, with momentum or without."""

        @model_validator(mode="after")
        def _known_coefficients(self) -> "FedNova.Hyper":
            if self.optimizer != "sgd":
                raise RayflError(
                    f"={self.optimizer!r} has no a_i in closed form; use optimizer='sgd'", key=("optimizer",)
                )
            return self

    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"
    gather: Mapping[str, Gather] = {"direction": WeightedMean(), "norm": WeightedMean()}

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        norm = coefficient_norm(ctx.work["train"].num_steps, self.hyper.momentum)
        if not norm:
            return Finished(state, None)
        direction = tree.scale(self.progress(carry), 1 / norm)
        return self.finished(state, {"direction": direction, "norm": scalar_packet("norm", norm)}, carry, ctx)

    def server_update(
        self, server: ModelState, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[ModelState, Metrics]:
        direction = received["direction"].result
        if not direction:
            return server, {}
        effective_steps = float(received["norm"].result["norm"])
        params = tree.add(server["params"], direction, -effective_steps)
        return {"params": params}, {"fednova/effective_steps": effective_steps}


def coefficient_norm(num_steps: int, momentum: float) -> float:
    """|a_i|_1: tau for plain SGD; with momentum rho the sum of (1 - rho^k) / (1 - rho) over k = 1, ..., tau."""
    if not momentum:
        return float(num_steps)
    return (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)
