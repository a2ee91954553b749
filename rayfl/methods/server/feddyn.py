"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

Client i keeps h_i, its estimate of its own gradient, and minimises f_i(y) - <h_i, y> + alpha / 2 ||y - x||^2 by local
steps from the received x; the client sends delta_i = x - y_i. Then

h_i <- h_i + alpha delta_i,   h <- h + (alpha / N) sum_S delta_i,   x <- x - mean_S delta_i - h / alpha,

with S those who delivered and N all clients. At the fixed point h = 0 and each h_i is the gradient of f_i at x, the
minimiser of the plain mean of the f_i. So the mean is uniform, and there is no `weighting`.

- States hold h_i / alpha and h / alpha, sums of deltas, as "shift". Both have the paper's sign: h moves by -alpha / N
  times a sum of y_i - x. The authors' code keeps sums of y_i - x, -h_i / alpha, and adds their mean to x.
- h = mean_i h_i over all N after every round, whoever took part: a client that is absent, or whose upload is lost,
  keeps its h_i. A lossy uplink sends C(delta_i), with error feedback or without, and h_i moves by alpha C(delta_i).
- A round in which nothing arrives changes nothing.
- The authors' code divides alpha by a client's share of the examples; here all clients have the same alpha.
- The model that is evaluated and saved is the mean of the models of S in the last round, which is x + h / alpha after
  the update. It varies less under partial participation than x. The authors' code evaluates both;
  `judged="cloud"` takes x. The training is the same to the bit.
- Any local optimizer that comes near the minimum works. Weight decay is a part of f_i.
- The recorded training loss is f_i, without the other two terms.
- The message is called "shift" and not "delta", so that no rule that rescales a delta at the server (elastic) moves h
  without the h_i. Robust rules and central noise change the mean that arrives, and h moves by the changed one.
"""

from typing import Literal

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
    Traits,
    Tree,
    WeightedMean,
    compressed,
    tree,
)
from rayfl.methods.shared.distributed_gradient import ShiftState
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class FedDynHyper(LocalWork):
    """Hyper-parameters of FedDyn."""

    alpha: float = Field(default=0.1, gt=0, description="strength of the dynamic regularization")
    judged: Literal["active_mean", "cloud"] = Field(
        default="active_mean",
        description="the evaluated model: the mean of the clients' models of the last round, or x, the download",
    )


class FedDynCarry(LocalCarry, ShiftState):
    """A client's carry; "shift" is h_i / alpha."""


class FedDynServer(ModelState, ShiftState):
    """Server state: x, and h / alpha as "shift"."""


class FedDyn(GradientMethod, ModelServer):
    """Client: y <- y - eta_l (g_i(y) - h_i + alpha (y - x)). Down: x. Up: delta_i. Client state: h_i / alpha."""

    hyper: FedDynHyper
    paper = "Acar et al., ICLR 2021"
    capabilities = Capabilities(on_device=True, keeps_parts=True)
    gather = {"shift": WeightedMean()}

    @property
    def strength(self) -> float:
        """What multiplies the regularization."""
        return self.hyper.alpha

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ShiftState:
        return {"shift": tree.zeros_like(params)}

    def begin(self, state: ShiftState, received: Message, ctx: Context) -> FedDynCarry:
        return {**super().begin(state, received, ctx), "shift": state["shift"]}

    def direction(self, carry: FedDynCarry, gradient: Tree) -> Tree:
        pull = tree.sub(tree.sub(carry["params"], carry["received"]), carry["shift"])
        return tree.add(gradient, pull, self.strength)

    def finish(self, state: ShiftState, carry: FedDynCarry, ctx: Context) -> Finished:
        message, state = compressed(state, {"shift": self.progress(carry)}, ctx)
        for packet in message.values():
            state = {**state, "shift": tree.add(state["shift"], packet.decode_beside(state["shift"]))}
        return Finished(state, message, metrics=self.train_loss(carry, ctx))

    def init_server(self, params: Tree) -> FedDynServer:
        return {"params": params, "shift": tree.zeros_like(params)}

    def update(self, server: FedDynServer, received: Received, ctx: Context) -> FedDynServer:
        mean, share = received["shift"].result, received["shift"].count / ctx.num_clients
        shift = tree.add(server["shift"], mean, share)
        return {"params": tree.sub(tree.sub(server["params"], mean), shift), "shift": shift}

    def model(self, server: FedDynServer) -> Tree:
        return server["params"] if self.hyper.judged == "cloud" else tree.add(server["params"], server["shift"])
