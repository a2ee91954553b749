"""FedALA: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023, Algorithm 1.

Client i keeps u_i, the model that it trained last, and weights W_i in [0, 1], at first 1, for the last tensors of the
model. When it receives x, it takes the other tensors from x, and mixes the last ones entry by entry:

t = u_i + (x - u_i) o W_i,   W_i <- clip(W_i - eta_w g(t) o (x - u_i), 0, 1), batch by batch,

with all else frozen. Then it trains from t as in FedAvg, keeps the result as u_i, and sends x - u_i.

- A round has one pass, over a share of the train split that is drawn for the round (the authors' code: a window of the
  examples that begins at a drawn place). Round 0 has none, as u_i = x.
- When a client first gets an x that differs from its own model, in whichever round, it repeats the pass over one and
  the same share until the standard deviation of the last 10 losses is below 0.1, as in the authors' code. There these
  are losses of passes, here of batches. `first_passes` passes are planned; a client that stops earlier does not change
  W_i in the rest. Work and simulated time count all planned passes.
- After the exchange a client is evaluated with t for the new x and its last W_i, which the evaluation does not train.
  Right after its training it is evaluated with u_i. The global model is x.
- A client that is not selected, or whose round is lost, keeps u_i and W_i, and still has its first fit before it.
- Entries in which x = u_i have no gradient, and their W_i do not move. W_i = 1 is FedAvg.
"""

from dataclasses import replace

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Plan,
    Stage,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, OwnModel

FIT = "weights"
"""The stage that fits W_i."""


class FedALAHyper(LocalTraining):
    """Hyper-parameters of FedALA."""

    num_mixed: int = Field(default=2, ge=1, description="tensors at the end of the model that are mixed entry by entry")
    weights_lr: float = Field(default=1.0, ge=0, description="step size of the weights, eta_w")
    share: float = Field(default=0.8, gt=0, le=1, description="share of the train split that a pass is over")
    first_passes: int = Field(default=20, ge=1, description="most passes of a client's first fit; later ones have one")


class FedALAState(ModelState):
    """Client state; "params" are u_i."""

    weights: Tree  # W_i, of the tensors that are mixed
    fitted: torch.Tensor  # bool: whether W_i has been fitted


class FedALACarry(LocalCarry):
    """A client's carry."""

    own: Tree  # u_i
    weights: Tree  # W_i
    losses: torch.Tensor  # float32 [10]: the last ones of the stage; NaN where there were fewer


class FedALA(OwnModel, FedAvg):
    """FedAvg in which each client starts from its own mixture of x and its last model."""

    hyper: FedALAHyper
    paper = "Zhang et al., AAAI 2023"
    capabilities = Capabilities(on_device=True, takes_stale=True)

    def plan(self, round_number: int, coin: float) -> Plan:
        hyper = self.hyper
        fitting = Stage(FIT, epochs=1, batch_size=hyper.batch_size or None, subset=hyper.share)
        return Plan(stages=(fitting, hyper.stage(round_number)) if round_number else (hyper.stage(round_number),))

    def stages(self, state: FedALAState, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
        passes = 1 if state["fitted"] else self.hyper.first_passes
        return tuple(replace(stage, epochs=passes) if stage.name == FIT else stage for stage in plan.stages)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedALAState:
        last = dict(list(params.items())[-self.hyper.num_mixed :])
        return {"params": params, "weights": tree.map(torch.ones_like, last), "fitted": torch.tensor(False)}

    def begin(self, state: FedALAState, received: Message, ctx: Context) -> FedALACarry:
        carry, previous, weights = super().begin(state, received, ctx), state["params"], state["weights"]
        return {
            **carry,
            "params": {**carry["params"], **tree.blend(carry["params"], previous, weights)},
            "own": previous,
            "weights": weights,
            "losses": next(iter(weights.values())).new_full((10,), torch.nan),
        }

    def step(self, carry: FedALACarry, batch: Batch, *, stage: Stage) -> FedALACarry:
        if stage.name != FIT:
            return super().step(carry, batch, stage=stage)
        params, x, previous, eta = carry["params"], carry["received"], carry["own"], self.hyper.weights_lr
        loss, gradient = self.task.value_and_grad(
            {name: params[name] for name in carry["weights"]},
            batch,
            lambda last, batch: self.task.loss({**params, **last}, batch),
        )
        # Until there are ten losses the deviation is NaN, which is not below anything.
        calm = (carry["losses"].std(correction=0) < 0.1) & (stage.epochs != 1)
        weights = {
            name: torch.where(calm, old, old - eta * gradient[name] * (x[name] - previous[name])).clamp(0, 1)
            for name, old in carry["weights"].items()
        }
        return {
            **carry,
            "params": {**params, **tree.blend(x, previous, weights)},
            "weights": weights,
            "losses": torch.where(calm, carry["losses"], torch.cat([carry["losses"][1:], loss[None]])),
        }

    def finish(self, state: FedALAState, carry: FedALACarry, ctx: Context) -> Finished:
        new: FedALAState = {"params": carry["params"], "weights": carry["weights"], "fitted": state["fitted"]}
        if FIT in ctx.work:
            differs = [(carry["received"][name] != carry["own"][name]).any() for name in carry["weights"]]
            new["fitted"] = state["fitted"] | torch.stack(differs).any()
        return self.finished(new, {"delta": self.delta(carry)}, carry, ctx, "train")

    def eval_begin(self, state: FedALAState, model: Tree | None, carry: FedALACarry | None, ctx: Context) -> ModelState:
        x, weights = (model or {}, state["weights"]) if carry is None else (carry["params"], {})
        return {"params": {**x, **tree.blend(x, state["params"], weights)}}
