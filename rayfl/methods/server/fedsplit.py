"""FedSplit: Pathak, Wainwright, FedSplit: An Algorithmic Framework for Fast Federated Optimization, NeurIPS 2020,
Algorithm 1 (Peaceman-Rachford splitting).

Client i keeps a point z_i, at first the common x. From the received x it solves the proximal step at u = 2 x - z_i,
y = argmin f_i(y) + ||y - u||^2 / (2 s), by local steps from u, and moves z_i <- z_i + 2 (y - x). The server's model x
is the mean of all z_i. With exact steps a fixed point is the minimiser of the plain mean of the f_i, however unlike the
clients are; local steps solve the proximal step only nearly, and x then ends near that minimiser.

- The mean is uniform. In the paper all clients take part; here an absent client keeps its z_i, which still counts:
  x <- x - (1 / N) sum of z_i - z_i+ over those that delivered.
- Any local optimizer will do. For L-smooth f_i plain steps need lr below 2 / (L + 1 / s).
- A lossy uplink without memory sends C(z_i - z_i+), and z_i moves by just that, so that x stays the mean of the z_i.
- The recorded training loss is f_i, without the proximal term.
- Experimental: written from the published algorithm as it is known, without the paper's text at hand.
"""

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelServer,
    ModelState,
    Received,
    Sum,
    Traits,
    Tree,
    UplinkMemory,
    compressed,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class FedSplitHyper(LocalWork):
    """Hyper-parameters of FedSplit; the local work solves the proximal step."""

    prox_step: float = Field(default=1.0, gt=0, description="step of the proximal operator, s")


class FedSplitState(UplinkMemory):
    """Client state."""

    centre: Tree  # z_i


class FedSplitCarry(LocalCarry):
    """A client's carry; `received` is u, from which the local steps start."""

    model: Tree  # x


class FedSplit(GradientMethod, ModelServer):
    """Down: x. Up: z_i - z_i+."""

    hyper: FedSplitHyper
    paper = "Pathak and Wainwright, NeurIPS 2020"
    capabilities = Capabilities(on_device=True, keeps_parts=True)
    gather = {"change": Sum()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedSplitState:
        return {"centre": params}

    def begin(self, state: FedSplitState, received: Message, ctx: Context) -> FedSplitCarry:
        model = received["model"].decode()
        start = tree.sub(tree.scale(model, 2.0), state["centre"])
        return {**self.start(start), "model": model}

    def direction(self, carry: FedSplitCarry, gradient: Tree) -> Tree:
        return tree.add(gradient, tree.sub(carry["params"], carry["received"]), 1 / self.hyper.prox_step)

    def finish(self, state: FedSplitState, carry: FedSplitCarry, ctx: Context) -> Finished:
        centre, change = state["centre"], tree.scale(tree.sub(carry["model"], carry["params"]), 2.0)
        message, state = compressed(state, {"change": change}, ctx)
        if message and "change" not in state.get("uplink", {}):
            change = message["change"].decode_beside(centre)
        state = {**state, "centre": tree.sub(centre, change)}
        return Finished(state, message, metrics=self.train_loss(carry, ctx))

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        return {"params": tree.add(server["params"], received["change"].sum, -1 / ctx.num_clients)}
