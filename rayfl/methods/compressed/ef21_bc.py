"""EF21-BC, compressed both ways: Fatkhullin, Sokolov, Gorbunov, Li, Richtarik, EF21 with Bells & Whistles: Six
Algorithmic Extensions of Modern Error Feedback, arXiv 2110.03294, 2021 (JMLR 2025).

EF21 whose server sends no model. Server and clients keep x and w, an estimate of G that all of them know. In a round
the server sends b = C_down(G - w), and all set w <- w + b, x <- x - gamma w. Client: c_i = C(grad f_i(x) - h_i),
h_i <- h_i + c_i; it sends c_i. Server: G <- G + mean_i c_i. At the fixed point w = G = grad f(x) = 0, although the
gradients of single clients differ.

- C is the experiment's uplink, C_down its downlink. `feedback` is refused around both, and so is any C_down with a
  memory. Receivers divide the output of an unbiased one by 1 + omega, as in `ef21`.
- x^0 comes from the seed, and w = h_i = G = 0 at first. So nothing is sent down in round 0, in which x does not move.
- The evaluated model is the x at which the round's gradients were computed; the b made of them is sent in the next
  round.
- The paper derives a step size; the default here is half of EF21's.
- If clients are absent, G moves as in `ef21`, and w and x move in every round. A client that missed rounds gets every b
  that it missed, or x and w (8 bytes per entry), whichever is smaller, and is billed for it.
"""

from collections.abc import Sequence

from rayfl.methods.base import Capabilities, Context, Delivered, Field, Metrics, Packet, Received, Tree, tree
from rayfl.methods.compressed.ef21 import EF21
from rayfl.methods.shared.distributed_gradient import GradientStep, ShiftedServer, SteppingServer, contracting, shifted


class EF21BCHyper(GradientStep):
    """Hyper-parameters of EF21-BC."""

    lr: float = Field(default=0.025, gt=0, description="step size, gamma")


class EF21BCServer(ShiftedServer):
    """Server state, beside x and G."""

    known: Tree  # w


class EF21BC(SteppingServer, EF21):
    """Clients work as in EF21, but update x by themselves."""

    hyper: EF21BCHyper
    paper = "Fatkhullin et al., JMLR 2025"
    capabilities = Capabilities(on_device=True)
    num_held = 2

    def init_server(self, params: Tree) -> EF21BCServer:
        return {**super().init_server(params), "known": tree.zeros_like(params)}

    def steps(self, server: EF21BCServer, ctx: Context) -> Sequence[Packet]:
        """b, as packets that decode to the new x and to the new w."""
        known, lr = server["known"], self.hyper.rate(ctx.round)
        x = tree.add(server["params"], known, -lr)
        return self.encoded(tree.sub(server["shift"], known), ctx, (x, -lr), (known, 1.0))

    def server_update(
        self, server: EF21BCServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[EF21BCServer, Metrics]:
        x, known = (packet.decode() for packet in self.steps(server, ctx))
        shift = shifted(server["shift"], received["gradient"], contracting(ctx.uplink, known), ctx)
        return {"params": x, "known": known, "shift": shift}, {}
