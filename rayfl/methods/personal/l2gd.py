"""L2GD: Hanzely, Richtarik, Federated Learning of a Mixture of Global and Local Models, 2020, Algorithm 1; with
compressed messages compressed L2GD, Bergou, Burlachenko, Dutta, Richtarik, Personalized Federated Learning with
Communication Compression, 2022. Also in WEN Hao's slides.

min over all x_i of (1/n) sum_i f_i(x_i) + (lam / 2n) sum_i ||x_i - xbar||^2. A round is one iteration, by a coin that
all share: with probability 1 - p a gradient step, x_i <- x_i - beta grad f_i(x_i), beta = alpha / (n (1 - p)); else a
step to the mean, x_i <- (1 - gam) x_i + gam xbar, gam = alpha lam / (n p), which must be at most 1/2.

- Steps to the mean do not change it, so several in a row need it once: only the first after a gradient step sends
  anything, x_i up and xbar back in the same round. All start from one model, so round 0 sends nothing.
- This is the form with 1/n; the slides leave the n out of beta and gam.
- p = lam / (L + lam) makes the fewest exchanges, p (1 - p) an iteration.
- Compressors must be unbiased, and apply to x_i and xbar themselves, not to differences. Each client's xbar is
  compressed by itself.
- In the paper all clients take part. If clients are absent, xbar is the mean over those who delivered. A client that
  missed an exchange gets its xbar before the next step to the mean, unless that step is an exchange itself.
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
    Plan,
    RayflError,
    Received,
    Reply,
    Stage,
    Topology,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.distributed_gradient import OneBatch, OneGradient
from rayfl.methods.shared.model_server import ExchangedModel, ExchangedModelServer, Exchanges


class L2GDHyper(OneBatch):
    """Hyper-parameters of L2GD."""

    alpha: float = Field(default=1.0, gt=0, description="step size, alpha; a gradient step is alpha / (n (1 - p))")
    lam: float = Field(default=0.1, ge=0, description="weight of the distance to the mean, lambda")
    p: float = Field(default=0.1, gt=0, lt=1, description="probability of a step to the mean, p")

    def beta(self, num_clients: int) -> float:
        """The gradient step, alpha / (n (1 - p))."""
        return self.alpha / (num_clients * (1 - self.p))

    def gam(self, num_clients: int) -> float:
        """The step to the mean, alpha lam / (n p)."""
        return self.alpha * self.lam / (num_clients * self.p)


class L2GDState(ModelState):
    """Client state, beside x_i."""

    average: Tree  # the xbar that it last received


class L2GDCarry(L2GDState):
    """A client's carry."""

    beta: torch.Tensor
    loss: torch.Tensor


class L2GD(OneGradient, ExchangedModelServer):
    """Client: x_i and xbar. Server: xbar of the last exchange, and the number of exchanges.

    Metric: `train/loss`, f_i at the point of the gradient.
    """

    hyper: L2GDHyper
    paper = "Hanzely and Richtarik, 2020; Bergou et al., 2022"
    capabilities = Capabilities(on_device=True, personalized=True, newcomer="undefined")
    gather = {"model": WeightedMean()}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        hyper, gam = self.hyper, self.hyper.gam(num_clients)
        # 0.1 * 3 / 0.6 is 0.5 and a little in floats.
        if gam > 0.5 + 1e-12:
            raise RayflError(
                f"method.alpha={hyper.alpha:g}, lam={hyper.lam:g} and p={hyper.p:g} make gam = alpha lam / (n p) "
                f"{gam:.4g} with n={num_clients} clients, and it must be at most 0.5; lower alpha to "
                f"{0.5 * num_clients * hyper.p / hyper.lam:.4g}, or raise p"
            )

    def averages(self, coin: float) -> bool:
        """Whether a round of this coin is a step to the mean."""
        return coin < self.hyper.p

    def exchanges(self, ctx: Context) -> bool:
        """Whether this round is a step to the mean after a gradient step."""
        return self.averages(ctx.plan.coin) and ctx.round > 0 and not self.averages(ctx.coin(ctx.round - 1))

    def plan(self, round_number: int, coin: float) -> Plan:
        if self.averages(coin):
            return Plan(stages=(), coin=coin)
        return Plan(stages=(self.hyper.stage(),), down=False, up=False, coin=coin)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> L2GDState:
        return {"params": params, "average": params}

    def begin(self, state: L2GDState, received: Message, ctx: Context) -> L2GDCarry:
        average = received["model"].decode() if received else state["average"]
        params = state["params"]
        if self.averages(ctx.plan.coin) and not self.exchanges(ctx):
            params = self.pulled(params, average, ctx)
        beta = torch.tensor(self.hyper.beta(ctx.num_clients))
        return {"params": params, "average": average, "beta": beta, "loss": torch.zeros(())}

    def pulled(self, params: Tree, average: Tree, ctx: Context) -> Tree:
        """(1 - gam) x_i + gam xbar."""
        gam = self.hyper.gam(ctx.num_clients)
        return tree.add(tree.scale(params, 1 - gam), average, gam)

    def step(self, carry: L2GDCarry, batch: Batch, *, stage: Stage) -> L2GDCarry:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        params = {name: tensor - carry["beta"] * gradient[name] for name, tensor in carry["params"].items()}
        return {**carry, "params": params, "loss": loss}

    def finish(self, state: L2GDState, carry: L2GDCarry, ctx: Context) -> Finished:
        new: L2GDState = {"params": carry["params"], "average": carry["average"]}
        message = {"model": carry["params"]} if self.exchanges(ctx) else None
        return Finished(new, message, metrics={"train/loss": float(carry["loss"])} if ctx.work else {})

    def receive_reply(self, state: L2GDState, received: Message, ctx: Context) -> L2GDState:
        average = received["model"].decode()
        return {"params": self.pulled(state["params"], average, ctx), "average": average}

    def personal_message(self, server: ExchangedModel, server_memory: Exchanges, ctx: Context) -> Reply:
        # In an exchange the reply brings xbar.
        return Reply({}, server_memory) if self.exchanges(ctx) else super().personal_message(server, server_memory, ctx)

    def update(self, server: ExchangedModel, received: Received, ctx: Context) -> ExchangedModel:
        return {"params": received["model"].result, "exchanges": server["exchanges"] + 1}
