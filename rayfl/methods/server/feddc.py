"""FedDC: Gao, Fu, Li, Chen, Xu, Xu, FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction, CVPR 2022, Algorithm 1.

Client i keeps its drift h_i, and a control variate c_i as in SCAFFOLD. K local steps from the received x go along

g_i(y) + alpha (y - x + h_i) - c_i + c.

With delta_i = x - y_i, then h_i <- h_i - delta_i and c_i <- c_i - c + delta_i / (K eta_l); the server moves x <- x -
mean_S delta_i + mean_i h_i and c by 1 / N of the sum of the changes of the c_i, N the number of all clients.

- Without the control variates this is FedDyn, whoever takes part, and the code below adds them to FedDyn's: states hold
  -h_i and -mean_i h_i as "shift". FedDyn's page says what holds of them and of the evaluated model; in the first round
  x moves twice as far as the mean.
- c = mean_i c_i after every round, whoever took part. At the fixed point mean_i h_i = 0 and grad f_i(x) = c_i - alpha
  h_i: x is the minimiser of the plain mean of the f_i. So there is no `weighting`.
- The mean of h_i is over all clients, as in the authors' code; the paper prints the mean of y_i + h_i over the
  participants. The code also multiplies alpha and c by the clients' mean number of examples over this client's; here
  all clients have the same alpha.
- Local steps are plain SGD: with momentum or Adam delta_i / (K eta_l) is no mean of gradients. With `clip_norm`, as in
  the code (10), the whole direction is bounded. Weight decay is a part of f_i.
- c_i and h_i move by what was sent, also with a lossy uplink; with error feedback c_i moves by all of its change, as in
  SCAFFOLD.
- The code has alpha = 0.01 for CIFAR, 0.1 for MNIST, 0.005 for synthetic data.
"""

from rayfl.methods.base import (
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    FirstDraws,
    Message,
    Received,
    Sum,
    Traits,
    Tree,
    WeightedMean,
    compressed,
    tree,
)
from rayfl.methods.server.feddyn import FedDyn, FedDynCarry, FedDynHyper, FedDynServer
from rayfl.methods.shared.distributed_gradient import ShiftState


class FedDCHyper(FedDynHyper):
    """Hyper-parameters of FedDC."""

    alpha: float = Field(default=0.01, gt=0, description="strength of the pull to x - h_i")

    def unused(self) -> dict[str, str]:
        return {**super().unused(), **dict.fromkeys(("optimizer", "momentum"), "as FedDC's steps are plain SGD")}


class FedDCState(ShiftState):
    """Client state; "shift" is -h_i."""

    control_variate: Tree  # c_i


class FedDCCarry(FedDynCarry):
    """A client's carry."""

    correction: Tree  # c - c_i


class FedDCServer(FedDynServer):
    """Server state: x, -mean_i h_i as "shift", and c."""

    control_variate: Tree  # c


class FedDC(FedDyn):
    """Down: x and c. Up: delta_i and c_i - c_i+. Client state: -h_i and c_i."""

    hyper: FedDCHyper
    paper = "Gao et al., CVPR 2022"
    capabilities = Capabilities(on_device=True, keeps_parts=True)
    gather = {"shift": WeightedMean(), "control_variate": Sum()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedDCState:
        return {**super().init_client(client, params, draws), "control_variate": tree.zeros_like(params)}

    def begin(self, state: FedDCState, received: Message, ctx: Context) -> FedDCCarry:
        correction = tree.sub(received["control_variate"].decode(), state["control_variate"])
        return {**super().begin(state, received, ctx), "correction": correction}

    def direction(self, carry: FedDCCarry, gradient: Tree) -> Tree:
        return tree.add(super().direction(carry, gradient), carry["correction"])

    def finish(self, state: FedDCState, carry: FedDCCarry, ctx: Context) -> Finished:
        old, delta, like = state["control_variate"], self.progress(carry), state["shift"]
        steps = ctx.work["train"].num_steps * ctx.plan.stages[-1].lr
        # c_i - c_i+ = c - delta_i / (K eta_l), and the correction is c - c_i.
        change = tree.add(tree.add(carry["correction"], old), delta, -1 / steps)
        message, state = compressed(state, {"shift": delta, "control_variate": change}, ctx)
        if message:
            state = {**state, "shift": tree.add(like, message["shift"].decode_beside(like))}
            if "control_variate" not in state.get("uplink", {}):
                change = message["control_variate"].decode_beside(old)
        return Finished(
            {**state, "control_variate": tree.sub(old, change)}, message, metrics=self.train_loss(carry, ctx)
        )

    def init_server(self, params: Tree) -> FedDCServer:
        return {**super().init_server(params), "control_variate": tree.zeros_like(params)}

    def download(self, server: FedDCServer, ctx: Context) -> Download:
        return {"model": server["params"], "control_variate": server["control_variate"]}

    def update(self, server: FedDCServer, received: Received, ctx: Context) -> FedDCServer:
        change = received["control_variate"].sum
        return {
            **super().update(server, received, ctx),
            "control_variate": tree.add(server["control_variate"], change, -1 / ctx.num_clients),
        }
