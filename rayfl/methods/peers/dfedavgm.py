"""DFedAvgM: Sun, Li, Wang, Decentralized Federated Averaging, IEEE TPAMI 2023, Algorithm 1; quantized: Algorithm 2.

K heavy-ball steps y^{k+1} = y^k - eta g(y^k) + theta (y^k - y^{k-1}) from y^{-1} = y^0 = x_i, and then
x_i <- sum_j W_ij y_j.

- With a constant eta these steps are SGD with momentum theta from velocity 0, so this is `dpsgd` with momentum. 0.9 is
  a default of ours.
- `exchange="model"`: peers send C(y_j - x^0), as in `dpsgd`; C is the uplink.
- `exchange="printed"`, Algorithm 2 as it is printed: q_i = C(y_i - x_i) and x_i <- x_i + sum_j W_ij q_j. It never
  mixes models: disagreement that is there stays, and with a positive definite W and exact steps every peer ends at its
  own minimiser. Take it to reproduce the paper's text only; `choco` with momentum, and C the identity and gamma = 1, is
  Algorithm 1, and it compresses differences, too.
- A peer that is absent from the exchange continues with y_i.
- Peers on their own clocks mix each other's newest models; "printed" is refused there, because a neighbour that is slow
  would add the same change again and again.
"""

from typing import Any, Literal, NotRequired

from rayfl.methods.base import (
    BoundTask,
    Capabilities,
    Context,
    Field,
    Finished,
    HyperParameters,
    Received,
    Tree,
    tree,
    unused_with,
)
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDCarry, DPSGDHyper, DPSGDState


class DFedAvgMHyper(DPSGDHyper):
    """Hyper-parameters of DFedAvgM; its mixing weights are the topology's."""

    momentum: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="momentum of a round's steps, theta",
        json_schema_extra=unused_with(optimizer=["adam", "adamw"]),
    )
    exchange: Literal["model", "printed"] = Field(
        default="model", description="what is mixed: models; or, as Algorithm 2 is printed, a round's changes alone"
    )

    def unused(self) -> dict[str, str]:
        density = {"density": "beside exchange='printed'"} if self.exchange == "printed" else {}
        return {**super().unused(), "order": "as DFedAvgM trains before it mixes", **density}


class DFedAvgMState(DPSGDState):
    """A peer's state."""

    start: NotRequired[Tree]  # between training and exchange with exchange="printed", x_i


class DFedAvgM(DPSGD):
    """D-PSGD with momentum."""

    hyper: DFedAvgMHyper
    paper = "Sun, Li, Wang, IEEE TPAMI 2023"
    capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(task, hyper, **settings)
        # A change that is mixed twice counts twice; a model does not.
        self.capabilities = self.capabilities.but(takes_stale=self.hyper.exchange == "model")

    def finish(self, state: DFedAvgMState, carry: DPSGDCarry, ctx: Context) -> Finished:
        if self.hyper.exchange == "model":
            return super().finish(state, carry, ctx)
        new: DFedAvgMState = {"params": carry["params"], "start": carry["received"]}
        change = tree.sub(carry["params"], carry["received"])
        return Finished(new, {"change": change}, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: DFedAvgMState, received: Received, ctx: Context) -> DPSGDState:
        if self.hyper.exchange == "model":
            return super().mix(state, received, ctx)
        start = state.get("start")
        if not received or start is None:
            return {"params": state["params"]}
        return {"params": tree.add(start, received["change"].result)}
