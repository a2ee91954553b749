"""MimeLite: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, Mime: Mimicking Centralized Stochastic Algorithms in
Federated Learning, arXiv 2008.03606, 2020, Algorithm 1, its form without control variates.

Clients step with the statistics s of a central optimizer, which do not change while they train: y <- y - eta_l
U(g_i(y), s). After the round the server moves x <- x - eta_g mean_S delta_i, and s by one step of the central optimizer
with the mean of the clients' full gradients at the x that they received, G = mean_S grad f_i(x).

- momentum: U = (1 - b) g + b m, and m <- b m + (1 - b) G.
- adam: U = m' / (sqrt(v') + epsilon) with m' = b m + (1 - b) g and v' = b2 v + (1 - b2) g^2, which are not kept; and m,
  v <- the same with G in place of g. There is no bias correction.
- b = 0 with momentum is FedAvg. With one full-batch step and all clients this is momentum SGD on the mean of the f_i.
  Other code writes momentum as g + b m: its eta_l is (1 - b) times this one.
- G comes from a pass over the client's examples before training; with `clients.work` a slow client passes over a share
  of them. So a round costs one epoch more.
- Both means have the same weights, by default by examples. Weight decay is a part of f_i, and `clip_norm` bounds U.
- m and v start at 0. A round in which nothing arrives changes nothing. Clients keep nothing.
- The full Mime adds the control variate g_i(y) - g_i(x) + G, which needs two exchanges a round; it is not built.
"""

from typing import Literal

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    Message,
    ModelServer,
    ModelState,
    Plan,
    Received,
    Stage,
    State,
    Tree,
    WeightedMean,
    tree,
    unused_with,
)
from rayfl.methods.shared.full_gradient import MEASURE, GradientSum, mean_gradient, no_gradient, with_batch
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalTraining
from rayfl.methods.shared.optimizers import SGD, Optimizer

OF_ADAM = unused_with(statistics=["momentum"])


class MimeLiteHyper(LocalTraining):
    """Hyper-parameters of MimeLite."""

    statistics: Literal["momentum", "adam"] = Field(default="momentum", description="the central optimizer")
    beta: float = Field(default=0.9, ge=0, lt=1, description="share of m that a step keeps, b")
    beta2: float = Field(
        default=0.99, ge=0, lt=1, description="share of v that a step keeps, b2", json_schema_extra=OF_ADAM
    )
    epsilon: float = Field(default=1e-3, gt=0, description="added to the root of v", json_schema_extra=OF_ADAM)
    server_lr: float = Field(default=1.0, gt=0, description="learning rate of the server, eta_g")

    def unused(self) -> dict[str, str]:
        why = "as MimeLite's clients step with the server's statistics"
        return {**super().unused(), **dict.fromkeys(("optimizer", "momentum"), why)}


class MimeLiteCarry(GradientSum, LocalCarry):
    """A client's carry."""

    statistics: State  # m, and v of adam


class MimeLiteServer(ModelState):
    """Server state, beside x."""

    statistics: State  # m, and v of adam


class MimeLite(GradientMethod, ModelServer):
    """Down: x and s. Up: delta_i and grad f_i(x)."""

    hyper: MimeLiteHyper
    paper = "Karimireddy et al., arXiv 2008.03606"
    capabilities = Capabilities(on_device=True, keeps_parts=True)
    gather = {"delta": WeightedMean(), "gradient": WeightedMean()}

    @property
    def optimizer(self) -> Optimizer:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SGD()

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics by name."""
        return ("mean", "square") if self.hyper.statistics == "adam" else ("mean",)

    def moved(self, statistics: State, gradient: Tree) -> State:
        """The statistics after one more gradient."""
        beta, beta2 = self.hyper.beta, self.hyper.beta2
        after = {"mean": tree.add(tree.scale(statistics["mean"], beta), gradient, 1 - beta)}
        if "square" in statistics:
            squares = tree.mul(gradient, gradient)
            after["square"] = tree.add(tree.scale(statistics["square"], beta2), squares, 1 - beta2)
        return after

    def direction(self, carry: MimeLiteCarry, gradient: Tree) -> Tree:
        after = self.moved(carry["statistics"], self.penalised(carry, gradient))
        if "square" not in after:
            return after["mean"]
        return {
            name: mean / (after["square"][name].sqrt() + self.hyper.epsilon) for name, mean in after["mean"].items()
        }

    def penalised(self, carry: MimeLiteCarry, gradient: Tree) -> Tree:
        """The gradient with that of the weight decay."""
        decay = self.hyper.weight_decay
        return tree.add(gradient, carry["params"], decay) if decay else gradient

    def plan(self, round_number: int, coin: float) -> Plan:
        training = self.hyper.stage(round_number)
        return Plan(stages=(Stage(MEASURE, epochs=1, batch_size=training.batch_size), training))

    def begin(self, state: State, received: Message, ctx: Context) -> MimeLiteCarry:
        carry = super().begin(state, received, ctx)
        return {
            **carry,
            **no_gradient(carry["params"]),
            "statistics": {name: received[name].decode() for name in self.names},
        }

    def step(self, carry: MimeLiteCarry, batch: Batch, *, stage: Stage) -> MimeLiteCarry:
        if stage.name != MEASURE:
            return super().step(carry, batch, stage=stage)
        return with_batch(carry, self.penalised(carry, self.task.grad(carry["params"], batch)), batch)

    def finish(self, state: State, carry: MimeLiteCarry, ctx: Context) -> Finished:
        message = {"delta": self.delta(carry), "gradient": mean_gradient(carry)}
        return self.finished(state, message, carry, ctx, "train")

    def init_server(self, params: Tree) -> MimeLiteServer:
        return {"params": params, "statistics": {name: tree.zeros_like(params) for name in self.names}}

    def download(self, server: MimeLiteServer, ctx: Context) -> Download:
        return {"model": server["params"], **server["statistics"]}

    def update(self, server: MimeLiteServer, received: Received, ctx: Context) -> MimeLiteServer:
        return {
            "params": tree.add(server["params"], received["delta"].result, -self.hyper.server_lr),
            "statistics": self.moved(server["statistics"], received["gradient"].result),
        }
