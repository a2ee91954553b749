"""pFedMe: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1.

Client i minimises the Moreau envelope F_i(w) = min_theta f_i(theta) + lam / 2 ||theta - w||^2, whose gradient is
lam (w - theta), with theta the minimiser. In each of R steps of a round it draws one minibatch D_r, comes near to theta
by K gradient steps on it, and moves w:

theta <- theta - personal_lr (g(theta; D_r) + lam (theta - w)), K times;   w <- w - eta lam (w - theta), eta = lr.

w and theta start from the received x; theta is kept from step to step. Server: x <- (1 - beta) x + beta
mean_S w_{i,R}, with S sampled. All clients download and train in every round, and only those of S upload.

- Step sizes: eta lam is below 1, or w would go past theta. A step multiplies theta's distance from the minimiser by
  1 - personal_lr (lam + L), with L the curvature of f_i: the K steps converge for personal_lr (lam + L) < 2, so that
  personal_lr lam is below 2, and do not oscillate for personal_lr (lam + L) <= 1.
- The defaults are the paper's values for MNIST except personal_lr, which is 0.1 in the paper. With lam = 15 the factor
  is then -0.5 for L = 0, and the last theta still oscillates; with 0.03 the factor is 0.55. On the demo's data
  (digits, 20 clients, 30 rounds, seed 1) own/accuracy is 0.877 with 0.03 and 0.656 with 0.1; that of w, which does not
  oscillate, is 0.909 with 0.1.
- `personal` is the model with which a client is evaluated: its last theta, as in the paper; or w_{i,R}, as in the
  authors' code.
- The authors' code also has a weight decay of 0.001 on theta, which the paper does not have: `weight_decay`, 0 by
  default.
- The mean is uniform (`weighting`). A client sends the difference of w_{i,R} to x, which gives the same mean. A client
  that is not selected sends nothing; its download is billed like all others.
- The recorded training loss is f_i at theta, before each of the K steps.
"""

from typing import Literal

from pydantic import Field, model_validator

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Finished,
    Message,
    ModelState,
    Plan,
    RayflError,
    Received,
    Stage,
    Tree,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import NOT_PLAIN, LocalCarry, LocalTraining, OwnModel, Weighting


class PFedMeHyper(LocalTraining):
    """Hyper-parameters of pFedMe, with the paper's values for MNIST except personal_lr."""

    lr: float = Field(default=0.005, gt=0, description="step size of w, eta")
    default_steps = 20
    steps: int | None = Field(default=None, ge=1, description="steps of w a round, R (20 where epochs is not given)")
    batch_size: int = Field(default=20, ge=0, description="examples of a step's one batch, b; 0: the whole split")
    weighting: Weighting = Field(default="uniform", description="weight of a client in the average")
    lam: float = Field(default=15.0, gt=0, description="how strongly theta and w are bound to each other, lambda")
    inner_steps: int = Field(default=5, ge=1, description="steps of theta for one of w, all on one batch, K")
    personal_lr: float = Field(
        default=0.03, gt=0, description="step size of theta, the same in all rounds; theta oscillates above 1 / lam"
    )
    beta: float = Field(default=1.0, gt=0, description="how far x moves to the clients' mean; above 1: beyond it")
    personal: Literal["theta", "w"] = Field(default="theta", description="the model with which a client is evaluated")

    def unused(self) -> dict[str, str]:
        return {**super().unused(), **dict.fromkeys(NOT_PLAIN, "as theta and w move by plain steps")}

    @model_validator(mode="after")
    def _stable_steps(self) -> "PFedMeHyper":
        largest = self.lr * (2 if self.lr_schedule == "cosine-literal" else 1)
        if largest * self.lam >= 1:
            raise RayflError(
                f"={self.lr} times lam={self.lam} makes steps of {largest * self.lam:g} (w - theta), by which w goes "
                "past theta; keep the product below 1",
                key=("lr",),
            )
        if self.personal_lr * self.inner_curvature >= 2:
            raise RayflError(
                f"={self.personal_lr} times {self.inner_curvature:g}, the curvature that lam and "
                "weight_decay give theta's objective, is 2 or more, and the steps of theta diverge; lower personal_lr",
                key=("personal_lr",),
            )
        return self

    @property
    def inner_curvature(self) -> float:
        """The curvature of theta's objective beside that of f_i."""
        return self.lam + self.weight_decay


class PFedMeCarry(LocalCarry):
    """A client's carry; its "params" are w."""

    theta: Tree


class PFedMe(OwnModel, FedAvg):
    """FedAvg of the w_{i,R}, with another step at the server. Client state: the model with which it is evaluated."""

    hyper: PFedMeHyper
    paper = "Dinh et al., NeurIPS 2020"
    capabilities = Capabilities(on_device=True)

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(round_number),), trainers="all")

    def begin(self, state: ModelState, received: Message, ctx: Context) -> PFedMeCarry:
        carry = super().begin(state, received, ctx)
        return {**carry, "theta": carry["params"]}

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return float(self.hyper.inner_steps)

    def step(self, carry: PFedMeCarry, batch: Batch, *, stage: Stage) -> PFedMeCarry:
        w, theta, total = carry["params"], carry["theta"], carry["loss"]
        for _ in range(self.hyper.inner_steps):
            loss, gradient = self.task.value_and_grad(theta, batch)
            gradient = self.optimizer.penalised(gradient, theta)
            theta = tree.add(theta, tree.add(gradient, self.binding(theta, w)), -self.hyper.personal_lr)
            total = total + loss / self.hyper.inner_steps
        w = tree.add(w, tree.sub(w, theta), -stage.lr * self.hyper.lam)
        return {**carry, "params": w, "theta": theta, "loss": total}

    def binding(self, theta: Tree, w: Tree) -> Tree:
        """The gradient in theta of its bond to w, lam / 2 ||theta - w||^2."""
        return tree.scale(tree.sub(theta, w), self.hyper.lam)

    def finish(self, state: ModelState, carry: PFedMeCarry, ctx: Context) -> Finished:
        return super().finish({"params": self.evaluated_params(carry)}, carry, ctx)

    def evaluated_params(self, carry: PFedMeCarry) -> Tree:
        """The client's model after local training."""
        return carry["theta" if self.hyper.personal == "theta" else "params"]

    def eval_begin(self, state: ModelState, model: Tree | None, carry: PFedMeCarry | None, ctx: Context) -> ModelState:
        return {"params": state["params"] if carry is None else self.evaluated_params(carry)}

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        return {"params": tree.add(server["params"], received["delta"].result, -self.hyper.beta)}
