"""ADMM for a mixture of global and local models: WEN Hao, Problems of Personalization in Federated Learning (slides).

min over all x_i of sum_i f_i(x_i) + (lam / 2) sum_i ||x_i - xbar||^2, written as min sum_i ft_i(x_i) - (lam N / 2)
||z||^2 subject to N z = sum_i x_i, with ft_i = f_i + (lam / 2) ||x||^2. A round, all x_i moving at once (Jacobi):

    u_i = N z - sum over j other than i of x_j
    x_i <- argmin ft_i(x) - <y, x> + (rho / 2) ||u_i - x||^2
    z   <- (rho sum_i x_i - y) / (rho N - lam)
    y   <- y + beta (N z - sum_i x_i)

At its fixed point z = xbar, y = lam xbar and grad f_i(x_i) + lam (x_i - xbar) = 0.

- The z-step is where <y, N z> + (rho / 2) ||N z - S||^2 - (lam N / 2) ||z||^2 is stationary, and a minimum for
  rho N > lam. The slides print y_i in the x-step; there is one y.
- There is no proof that the Jacobi form converges. It does on mu-strongly convex f_i with rho N >= 1.5 (lam + lam^2 /
  mu) and beta <= rho; beta <= rho and rho N > lam are always asked for, the rest where `mu` is given. `damping` keeps a
  share of the old x_i.
- x_step = "gradient": local steps from the last x_i. "closed_form": one Newton step on the whole train split, its
  linear system solved by conjugate gradients, which is the argmin where f_i is quadratic.
- The server sends N z - sum_j x_j, to which a client adds its x_i to get u_i, and y: 8 bytes per entry. A client sends
  the change of x_i. With a lossy uplink x_i changes by the decoded message, so that client and server have the same
  x_i, and the remaining change follows in later rounds.
- In the slides all clients take part. An absent client keeps x_i, which stays in the sum. A round in which nobody
  delivers changes nothing. At first x_i = z = x^0 and y = 0.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Delivered,
    Download,
    Finished,
    Message,
    Metrics,
    ModelServer,
    ModelState,
    Plan,
    RayflError,
    Received,
    Stage,
    Sum,
    Topology,
    Tree,
    UplinkMemory,
    compressed,
    tree,
    unused_with,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, OwnModel
from rayfl.task import inner


class MixtureADMMHyper(LocalWork):
    """Hyper-parameters of the mixture's ADMM. lr * (L + lam + rho) below 2 keeps the local steps stable."""

    lam: float = Field(default=0.1, ge=0, description="weight of the distance to the mean, lambda")
    rho: float = Field(default=1.0, gt=0, description="penalty on ||N z - sum_i x_i||^2 / 2, rho")
    beta: float | None = Field(default=None, gt=0, description="step of the multiplier y, at most rho; default: rho")
    damping: float = Field(default=0.0, ge=0, lt=1, description="share of the old x_i in the new one")
    x_step: Literal["gradient", "closed_form"] = Field(
        default="gradient",
        description="local steps; or one Newton step, the minimiser of a quadratic f_i (others may need a larger rho)",
    )
    cg_iterations: int = Field(
        default=50,
        ge=1,
        description="iterations of conjugate gradients in closed_form, at most",
        json_schema_extra=unused_with(x_step=["gradient"]),
    )
    mu: float | None = Field(
        default=None, gt=0, description="strong convexity of the f_i, to check that rho is large enough"
    )

    @model_validator(mode="after")
    def _fits(self) -> "MixtureADMMHyper":
        if self.beta is not None and self.beta > self.rho:
            raise RayflError(
                f"={self.beta:g} must be at most rho={self.rho:g}, or y runs away; lower beta", key=("beta",)
            )
        return self

    def default_work(self) -> dict[str, int]:
        return super().default_work() if self.x_step == "gradient" else {}

    def unused(self) -> Mapping[str, str]:
        gradient = LocalWork.model_fields if self.x_step == "closed_form" else ()
        return {**super().unused(), **dict.fromkeys(gradient, "beside x_step='closed_form'")}


class MixtureState(ModelState, UplinkMemory):
    """Client state: x_i."""


class MixtureCarry(LocalCarry):
    """A client's carry."""

    target: Tree  # u_i
    multiplier: Tree  # y


class MixtureServer(ModelState):
    """Server state, beside z."""

    multiplier: Tree  # y
    start: Tree  # x^0
    moved: Tree  # sum_i x_i - N x^0, which is 0 at first


class MixtureADMM(OwnModel, GradientMethod, ModelServer):
    """Client: x_i. Server: z, y, and the sum of all x_i."""

    hyper: MixtureADMMHyper
    paper = "WEN Hao, Problems of Personalization in Federated Learning (slides)"
    capabilities = Capabilities(on_device=True, newcomer="undefined")
    gather = {"move": Sum()}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        hyper, total = self.hyper, self.hyper.rho * num_clients
        if total <= hyper.lam:
            raise RayflError(
                f"method.rho={hyper.rho:g} times {num_clients} clients must be above lam={hyper.lam:g}, or z has no "
                f"minimum; set rho above {hyper.lam / num_clients:.4g}"
            )
        needed = 0.0 if hyper.mu is None else 1.5 * (hyper.lam + hyper.lam**2 / hyper.mu)
        # 1.8 is 4 * 0.45 and a little in floats.
        if total < needed * (1 - 1e-12):
            raise RayflError(
                f"method.rho={hyper.rho:g} times {num_clients} clients must be at least 1.5 (lam + lam^2 / mu) = "
                f"{needed:.4g} to converge; set rho to {needed / num_clients:.4g} or more"
            )

    def plan(self, round_number: int, coin: float) -> Plan:
        if self.hyper.x_step == "closed_form":
            return Plan(stages=(Stage(steps=1, batch_size=None),))
        return super().plan(round_number, coin)

    def begin(self, state: MixtureState, received: Message, ctx: Context) -> MixtureCarry:
        x = state["params"]
        target = tree.add(received["gap"].decode(), x)
        return {**self.start(x), "target": target, "multiplier": received["multiplier"].decode()}

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 1.0 if self.hyper.x_step == "gradient" else 1.0 + 2 * self.hyper.cg_iterations

    def step(self, carry: MixtureCarry, batch: Batch, *, stage: Stage) -> MixtureCarry:
        lam, rho, x = self.hyper.lam, self.hyper.rho, carry["params"]
        loss, gradient = self.task.value_and_grad(x, batch)
        pull = tree.sub(tree.scale(x, lam + rho), tree.add(carry["multiplier"], carry["target"], rho))
        gradient = tree.add(gradient, pull)
        if self.hyper.x_step == "gradient":
            return self.descend(carry, loss, gradient, stage)

        def product(vector: Tree) -> Tree:
            return tree.add(self.task.hvp(x, batch, vector), vector, lam + rho)

        move = solved(product, gradient, self.hyper.cg_iterations)
        return {**carry, "params": tree.sub(x, move), "loss": carry["loss"] + loss}

    def end_stage(self, carry: MixtureCarry, *, stage: Stage) -> MixtureCarry:
        if not self.hyper.damping:
            return carry
        move = tree.sub(carry["params"], carry["received"])
        return {**carry, "params": tree.add(carry["received"], move, 1 - self.hyper.damping)}

    def finish(self, state: MixtureState, carry: MixtureCarry, ctx: Context) -> Finished:
        packets, state = compressed(state, {"move": tree.sub(carry["params"], carry["received"])}, ctx)
        if packets:
            state = {**state, "params": tree.add(carry["received"], packets["move"].decode_beside(carry["received"]))}
        return Finished(state, packets, metrics=self.train_loss(carry, ctx))

    def init_server(self, params: Tree) -> MixtureServer:
        zeros = tree.zeros_like(params)
        return {"params": params, "multiplier": zeros, "start": params, "moved": zeros}

    def gap(self, server: MixtureServer, num_clients: int) -> Tree:
        """N z - sum_j x_j = N (z - x^0) - (sum_j x_j - N x^0)."""
        return tree.sub(tree.scale(tree.sub(server["params"], server["start"]), num_clients), server["moved"])

    def download(self, server: MixtureServer, ctx: Context) -> Download:
        return {"gap": self.gap(server, ctx.num_clients), "multiplier": server["multiplier"]}

    def server_update(
        self, server: MixtureServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[MixtureServer, Metrics]:
        moved, size, hyper = received["move"].result, ctx.num_clients, self.hyper
        if not moved:
            return server, {}
        moved = tree.add(server["moved"], moved)
        total = tree.add(moved, server["start"], size)
        z = tree.scale(tree.add(server["multiplier"], total, -hyper.rho), -1 / (hyper.rho * size - hyper.lam))
        server = {**server, "params": z, "moved": moved}
        gap = self.gap(server, size)
        multiplier = tree.add(server["multiplier"], gap, hyper.rho if hyper.beta is None else hyper.beta)
        return {**server, "multiplier": multiplier}, {"admm/residual": tree.norm(gap)}


def solved(product: Callable[[Tree], Tree], right: Tree, iterations: int) -> Tree:
    """v with product(v) = right, for a symmetric positive product, by conjugate gradients; safe under vmap.

    Once the residual is a millionth of the right side it moves no more.
    """
    solution, residual, direction = tree.zeros_like(right), right, right
    square = inner(residual, residual)
    least = 1e-12 * square

    for _ in range(iterations):
        image = product(direction)
        curvature = inner(direction, image)
        goes_on = (square > least) & (curvature > 0)
        step = torch.where(goes_on, square / torch.where(goes_on, curvature, 1.0), 0.0)
        solution = {name: tensor + step * direction[name] for name, tensor in solution.items()}
        residual = {name: tensor - step * image[name] for name, tensor in residual.items()}
        new = inner(residual, residual)
        ratio = torch.where(goes_on, new / torch.where(goes_on, square, 1.0), 0.0)
        direction = {name: residual[name] + ratio * tensor for name, tensor in direction.items()}
        square = torch.where(goes_on, new, square)
    return solution
