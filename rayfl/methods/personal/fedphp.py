"""FedPHP: Li, Zhan, Shao, Li, Song, FedPHP: Federated Personalization with Inherited Private Models, ECML PKDD 2021.

Every client keeps a personal model p_i beside the global one. A round trains y from the received x_t on
(1 - lam) f_i(y) + lam R(y, p_i), with R between the outputs or the representations of y and those of p_i, which is how
p_i hands over what the client knows. Then p_i <- mu_i p_i + (1 - mu_i) y: it inherits from the local models of all
rounds. The rest is FedAvg, and p_i is the client's model.

- mu_i grows with the number n_i of rounds in which the client has taken part before, mu_i = mu min(1, n_i / n) with n
  the rounds that a client takes part in on average. So p_i is first the local model, and then an average of them.
- `transfer="mmd"`: R is the squared maximum mean discrepancy of a batch's representations, the inputs of the head, with
  the sum of five Gaussian kernels whose widths are 1/4, 1/2, 1, 2 and 4 times the mean squared distance in the batch.
- `transfer="kd"`: R is the cross-entropy of softmax(outputs of y) to softmax(outputs of p_i / temperature).
- Outputs of p_i have no gradient and are computed in evaluation mode. Only classifiers have representations.
- Before a client's first round p_i is the common start. A client that is absent keeps p_i.
- One gradient and one forward pass of p_i cost 4/3 of FedAvg's operations. Messages are those of FedAvg. The recorded
  training loss has both terms.
- Experimental: the paper's text was not at hand. mu_i, both forms of R and the temperature of p_i alone are those of
  the authors' published code.
"""

from typing import Literal

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
    unused_with,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, OwnModel
from rayfl.methods.shared.own_head import WithHead

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The kernels' widths, as multiples of the mean squared distance."""


class FedPHPHyper(LocalTraining):
    """Hyper-parameters of FedPHP."""

    lam: float = Field(default=0.1, ge=0, le=1, description="weight of the transfer from the personal model, lambda")
    mu: float = Field(
        default=0.9, ge=0, lt=1, description="share of the old personal model that a client's later rounds keep"
    )
    transfer: Literal["mmd", "kd"] = Field(
        default="mmd", description="what is compared: representations (mmd), or outputs (kd)"
    )
    temperature: float = Field(
        default=4.0,
        gt=0,
        description="temperature of the personal model",
        json_schema_extra=unused_with(transfer=["mmd"]),
    )


class FedPHPState(ModelState):
    """Client state, beside p_i."""

    count: torch.Tensor  # n_i, int64 []


class FedPHPCarry(LocalCarry):
    """A client's carry."""

    personal: Tree  # p_i
    kept: torch.Tensor  # mu_i, float32 []


class FedPHP(WithHead, OwnModel, FedAvg):
    """FedAvg with a personal model p_i at every client."""

    hyper: FedPHPHyper
    paper = "Li et al., ECML PKDD 2021"
    capabilities = Capabilities(on_device=True, depends_on_num_rounds=True)

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 4 / 3

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedPHPState:
        return {"params": params, "count": torch.tensor(0)}

    def begin(self, state: FedPHPState, received: Message, ctx: Context) -> FedPHPCarry:
        usual = max(1, ctx.num_selected * ctx.num_rounds // ctx.num_clients)
        kept = self.hyper.mu * min(1.0, int(state["count"]) / usual)
        carry = self.start(received["model"].decode())
        return {**carry, "personal": state["params"], "kept": torch.tensor(kept)}

    def step(self, carry: FedPHPCarry, batch: Batch, *, stage: Stage) -> FedPHPCarry:
        taught = self.features(carry["personal"], batch, training=False)
        teacher = (self.logits(taught, carry["personal"]) / self.hyper.temperature).softmax(dim=1)

        def objective(params: Tree, batch: Batch) -> torch.Tensor:
            loss, features = self.task.loss_and_features(params, batch)
            if self.hyper.transfer == "mmd":
                transferred = discrepancy(features, taught, batch)
            else:
                log_shares = self.logits(features, params).log_softmax(dim=1)
                transferred = batch.mean(-(teacher * log_shares).sum(dim=1))
            return (1 - self.hyper.lam) * loss + self.hyper.lam * transferred

        loss, gradient = self.task.value_and_grad(carry["params"], batch, objective)
        return self.descend(carry, loss, gradient, stage)

    def inherited(self, carry: FedPHPCarry) -> Tree:
        """mu_i p_i + (1 - mu_i) y."""
        kept, personal = carry["kept"], carry["personal"]
        return {name: kept * personal[name] + (1 - kept) * tensor for name, tensor in carry["params"].items()}

    def finish(self, state: FedPHPState, carry: FedPHPCarry, ctx: Context) -> Finished:
        new: FedPHPState = {"params": self.inherited(carry), "count": state["count"] + 1}
        return self.finished(new, {"delta": self.delta(carry)}, carry, ctx)

    def eval_begin(self, state: FedPHPState, model: Tree | None, carry: FedPHPCarry | None, ctx: Context) -> ModelState:
        return {"params": state["params"] if carry is None else self.inherited(carry)}


def discrepancy(a: torch.Tensor, b: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The squared maximum mean discrepancy of two sets [batch, D] of representations, a scalar; padding counts 0.

    The kernels' widths, from the squared distances between different examples of both sets, have no gradient.
    """
    both = torch.cat([a, b])
    weights = batch.without_padding(torch.ones_like(a[:, 0]))
    signs, present = torch.cat([weights, -weights]), torch.cat([weights, weights])
    # Differences, not |x|^2 + |y|^2 - 2 x y, which is not exactly 0 for equal vectors.
    squares = (both[:, None] - both[None]).square().sum(dim=2)
    number = present.sum()
    mean = (present @ squares @ present).detach() / (number * (number - 1))
    # Equal representations are at distance 0 whatever the width.
    mean = mean.clamp(min=torch.finfo(mean.dtype).tiny)
    kernels = sum((torch.exp(-squares / (mean * width)) for width in WIDTHS), torch.zeros_like(squares))
    return signs @ kernels @ signs / weights.sum().square()
