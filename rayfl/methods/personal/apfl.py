"""APFL: Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020, Algorithm 1.

Client i keeps a model v_i of its own and alpha_i in [0, 1]. Its personal model is
vbar_i = alpha_i v_i + (1 - alpha_i) w, where w is its copy of the global model. Every local step takes one batch:

w <- w - eta g(w),   v_i <- v_i - eta alpha_i g(vbar_i),

and in the first step of a round alpha_i <- alpha_i - eta_alpha <g(vbar_i), v_i - w>, clipped to [0, 1]; all gradients
are those before the step. The server averages w as FedAvg does, and v_i and alpha_i never leave the client.

- Parameters are mixed, as in the paper. The authors' code mixes outputs and adds 0.02 alpha_i to the gradient of
  alpha_i.
- The step of v_i has the factor alpha_i: at alpha_i = 0 only a `weight_decay` moves v_i. While v_i = w, as at the
  start, alpha_i does not move. So alpha_i begins at 0.5. eta_alpha is eta unless `alpha_lr` is given; 0 keeps alpha_i
  fixed.
- w and v_i are trained with the same optimizer settings, each with a state of its own that is new in every round.
- A client is evaluated with vbar_i: right after its training with the w that it has trained, otherwise with the
  server's x. The global model is x.
- A client that is not selected, or whose round is lost, keeps v_i and alpha_i.
- The recorded training loss is that of w, as in FedAvg. An example costs two gradients.
"""

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
    Stage,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, OwnModel
from rayfl.task import inner


class APFLHyper(LocalTraining):
    """Hyper-parameters of APFL; v_i is trained with those of w."""

    alpha: float = Field(default=0.5, ge=0, le=1, description="initial share of v_i in the personal model, alpha")
    alpha_lr: float | None = Field(
        default=None, ge=0, description="learning rate of alpha, eta_alpha; 0: alpha is fixed; default: that of w"
    )


class APFLState(ModelState):
    """Client state; "params" are v_i."""

    alpha: torch.Tensor  # float32 []


class APFLCarry(LocalCarry, APFLState):
    """A client's carry: that of w, alpha_i, and the carry of v_i."""

    personal: LocalCarry
    first: torch.Tensor  # float32 []: 1 before the first step, then 0


class APFL(OwnModel, FedAvg):
    """FedAvg of w, with v_i and alpha_i as the client's state."""

    hyper: APFLHyper
    paper = "Deng et al., arXiv 2003.13461"
    capabilities = Capabilities(on_device=True, takes_stale=True)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> APFLState:
        return {"params": params, "alpha": torch.tensor(self.hyper.alpha)}

    def begin(self, state: APFLState, received: Message, ctx: Context) -> APFLCarry:
        return {
            **super().begin(state, received, ctx),
            "personal": self.start(state["params"]),
            "alpha": state["alpha"],
            "first": torch.ones(()),
        }

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 2.0

    def step(self, carry: APFLCarry, batch: Batch, *, stage: Stage) -> APFLCarry:
        personal, alpha, w = carry["personal"], carry["alpha"], carry["params"]
        loss, gradient = self.task.value_and_grad(tree.blend(personal["params"], w, dict.fromkeys(w, alpha)), batch)
        lr = carry["first"] * (stage.lr if self.hyper.alpha_lr is None else self.hyper.alpha_lr)
        return {
            **super().step(carry, batch, stage=stage),
            "personal": self.descend(personal, loss, tree.map(lambda tensor: alpha * tensor, gradient), stage),
            "alpha": (alpha - lr * inner(gradient, tree.sub(personal["params"], w))).clamp(0, 1),
            "first": torch.zeros_like(alpha),
        }

    def finish(self, state: APFLState, carry: APFLCarry, ctx: Context) -> Finished:
        return super().finish({"params": carry["personal"]["params"], "alpha": carry["alpha"]}, carry, ctx)

    def eval_begin(self, state: APFLState, model: Tree | None, carry: APFLCarry | None, ctx: Context) -> ModelState:
        personal, w = (state, model or {}) if carry is None else (carry["personal"], carry["params"])
        share = dict.fromkeys(w, (state if carry is None else carry)["alpha"])
        return {"params": tree.blend(personal["params"], w, share)}
