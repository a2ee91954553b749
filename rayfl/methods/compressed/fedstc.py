"""FedSTC: Sattler, Wiedemann, Mueller, Samek, Robust and Communication-Efficient Federated Learning from Non-i.i.d.
Data, IEEE TNNLS 2019, Algorithm 2.

Client: A_i += delta_i, C_i = STC(A_i), A_i -= C_i. Server: A += mean of C_i, C = STC(A), A -= C, x -= C. STC keeps the
largest entries as signs times one magnitude (compress/ternary.py); the rest stays in the residuals, on both sides.
A client that delivered gets C at the end of its round. One that was absent for s rounds first downloads what it missed,
the paper's partial sum, in the cheapest of the three forms of shared/broadcasts.py.

- Clients and server start from the common x^0, made from the seed, so round 0 begins without a download.
- A round in which nothing arrives broadcasts nothing and leaves the server's residual.
- keep_ratio is the same both ways, but a client with a retention ratio of its own sends that share. The paper's is
  1/400 with one local step; 0.1 is that of FedPSE's comparison.
- Means are weighted by examples as in FedAvg; the paper's are uniform.
The sign is ours: delta_i is x minus the trained model, so C is subtracted.
"""

from rayfl.compress.base import shapes_of
from rayfl.compress.sparse import Scope
from rayfl.compress.ternary import Ternary, TernaryCodec
from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Received,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.broadcasts import Broadcasting, BroadcastServer, caught_up
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalTraining


class FedSTCHyper(LocalTraining):
    """Hyper-parameters of FedSTC."""

    keep_ratio: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="share of the entries sent each way, p; or, up, clients.retention_ratio",
    )
    scope: Scope = Field(default="tensor", description="largest entries of every tensor, or of the whole model")


class FedSTCState(ModelState):
    """Client state, beside its copy of x."""

    residual: Tree  # A_i


class FedSTC(GradientMethod, Broadcasting):
    """Residuals A_i and A at both ends; both send STC of them."""

    hyper: FedSTCHyper
    paper = "Sattler et al., IEEE TNNLS 2019"
    capabilities = Capabilities(
        on_device=True, keeps_parts=True, own_compression=True, honours_retention=True, own_retention=("keep_ratio",)
    )
    gather = {"update": WeightedMean()}

    @property
    def step_compressor(self) -> Ternary:
        return Ternary(keep_ratio=self.hyper.keep_ratio, scope=self.hyper.scope)

    def step_codec(self, like: Tree) -> TernaryCodec:
        return TernaryCodec(shapes_of(like), self.hyper.keep_ratio, self.hyper.scope)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedSTCState:
        return {"params": params, "residual": tree.zeros_like(params)}

    def begin(self, state: FedSTCState, received: Message, ctx: Context) -> LocalCarry:
        return self.start(caught_up(state["params"], received))

    def finish(self, state: FedSTCState, carry: LocalCarry, ctx: Context) -> Finished:
        update = tree.add(state["residual"], self.progress(carry))
        ratio = masks.kept_ratio(ctx.traits, None, self.hyper.keep_ratio)
        packet, _ = self.step_compressor.keeping(ratio).encode(update, {}, ctx.generator)
        state = {"params": carry["received"], "residual": tree.sub(update, packet.decode_beside(update))}
        return self.finished(state, {"update": packet}, carry, ctx)

    def update(self, server: BroadcastServer, received: Received, ctx: Context) -> BroadcastServer:
        return self.broadcast(server, received["update"].result, ctx)
