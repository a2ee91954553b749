"""EASGD: Zhang, Choromanska, LeCun, Deep Learning with Elastic Averaging SGD, NIPS 2015, the synchronous form (Eq. 2
and 3, with the communication period of Algorithm 1).

Workers x_i are tied to a centre c by an elastic force. A round is a communication period: its first step is
x_i <- x_i - lr g_i(x_i) - a (x_i - c), the others are plain, and the centre moves by c <- c + a sum_i (x_i - c). Both
sides use the OLD values, those at the round's beginning, so that an exchange alone keeps c + sum_i x_i.

- a = lr rho in the paper. By default a = 0.9 / p with p the number of all clients, so that beta = p a = 0.9. The
  exchange alone takes the distance of the workers' mean from c times 1 - (p + 1) a, so a must be below 2 / (p + 1).
- With momentum or Adam the force stays outside of the optimizer, as in the paper's EAMSGD.
- A worker that is absent, or whose update is lost, takes no part on either side. Sums, not means, are over those who
  delivered. Workers send x_i - c and the server sends c; with a lossy uplink the centre moves by the decoded
  difference and the worker by the exact one.
- x_i is the personal model, and c the global one.
"""

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    Message,
    ModelServer,
    ModelState,
    RayflError,
    Received,
    Stage,
    Sum,
    Topology,
    Tree,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, OwnModel


class EASGDHyper(LocalWork):
    """Hyper-parameters of EASGD; `steps` is the communication period, tau_c."""

    a: float | None = Field(default=None, gt=0, description="elastic coefficient, lr rho; default: 0.9 / clients.count")

    def coefficient(self, num_clients: int) -> float:
        """a, for p = num_clients."""
        return 0.9 / num_clients if self.a is None else self.a


class EASGDCarry(LocalCarry):
    """A worker's carry."""

    distance: Tree  # x_i - c
    force: Tree  # a (x_i - c), before the first step


class EASGD(OwnModel, GradientMethod, ModelServer):
    """Client state: x_i. Server state: c."""

    hyper: EASGDHyper
    paper = "Zhang et al., NIPS 2015"
    capabilities = Capabilities(on_device=True, newcomer="model")
    gather = {"distance": Sum()}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        a, bound = self.hyper.coefficient(num_clients), 2 / (num_clients + 1)
        if a >= bound:
            raise RayflError(
                f"method.a={a:g} makes the centre of {num_clients} clients swing further with every exchange; set it "
                f"below 2 / (clients.count + 1) = {bound:.4g}, or leave it out for 0.9 / clients.count"
            )

    def begin(self, state: ModelState, received: Message, ctx: Context) -> EASGDCarry:
        distance = tree.sub(state["params"], received["model"].decode())
        force = tree.scale(distance, self.hyper.coefficient(ctx.num_clients))
        return {**self.start(state["params"]), "distance": distance, "force": force}

    def step(self, carry: EASGDCarry, batch: Batch, *, stage: Stage) -> EASGDCarry:
        carry = super().step(carry, batch, stage=stage)
        # Only the first step of a round feels it.
        params, force = tree.sub(carry["params"], carry["force"]), tree.zeros_like(carry["force"])
        return {**carry, "params": params, "force": force}

    def finish(self, state: ModelState, carry: EASGDCarry, ctx: Context) -> Finished:
        message = {"distance": carry["distance"]}
        return Finished({"params": carry["params"]}, message, metrics=self.train_loss(carry, ctx))

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        a = self.hyper.coefficient(ctx.num_clients)
        return {"params": tree.add(server["params"], received["distance"].result, a)}
