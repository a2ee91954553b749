"""CHOCO-SGD: Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication, ICML 2019, Algorithm 2 (gossip alone: Algorithm 1); with `order="mix_first"` the form of Koloskova, Lin,
Stich, Jaggi, Decentralized Deep Learning with Arbitrary Communication Compression, ICLR 2020, Algorithm 1.

Peer i keeps its model x_i, a public copy h_i of it, which its neighbours know too, and s_i = sum_j w_ij h_j (its own
copy included). A round: y_i is x_i after local training; q_i = C(y_i - h_i) goes to every neighbour; h_i += q_i;
s_i += sum_j w_ij q_j; x_i = y_i + gamma (s_i - h_i).

- `order="mix_first"` mixes before it sends, with the copies of the round before: x_i = y_i + gamma (s_i - h_i), then
  q_i = C(x_i - h_i).
- W is symmetric, so sum_i x_i changes by local training alone, for any C and gamma. With C the identity and gamma = 1,
  exchange_first is D-PSGD's average_first.
- The paper takes one step per round; here `epochs` or `steps` set the number.
- The papers tune gamma. By default gamma is the uplink's delta, 1 / (1 + omega) of an unbiased uplink, and 0.1 if the
  uplink states neither; gossip with top-k or rand-k then converges on rings of 6 and of 20 peers. The theorem's gamma
  is far smaller: rho^2 delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta), with rho the spectral gap of W
  and beta = ||I - W||.
- h_i begins at the common model, so that the first message is a difference too; in the paper it begins at 0
  (`hats="zero"`).
- With a constant learning rate and unlike data the peers' models stay different; `beer` removes that difference.
- With `topk` clients may have ratios of their own (`clients.retention_ratio`); gamma then follows the smallest delta.
- Copies agree at both ends only if every message arrives and the graph stays the same. So dropouts, unavailable peers,
  graphs that change, and weights that are not symmetric are refused; so are error feedback, and unbiased uplinks whose
  ratio differs between clients.
"""

from typing import Literal

from rayfl.methods.base import Capabilities, Context, Field, Finished, Received, State
from rayfl.methods.shared.gossip import CopiedStep, Gossip, PublicCopies
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class CHOCOHyper(LocalWork, CopiedStep):
    """Hyper-parameters of CHOCO-SGD; its mixing weights are the topology's."""

    order: Literal["exchange_first", "mix_first"] = Field(
        default="exchange_first",
        description="exchange_first: mix after the exchange, with this round's messages; mix_first: before it, with "
        "those of earlier rounds",
    )


class CHOCO(GradientMethod, Gossip):
    """A peer sends the compressed difference between its model and its public copy."""

    hyper: CHOCOHyper
    paper = "Koloskova et al., ICML 2019"
    capabilities = Capabilities(on_device=True, keeps_parts=True)

    def finish(self, state: PublicCopies, carry: LocalCarry, ctx: Context) -> Finished:
        x = self.pulled("model", carry["params"], state, ctx) if self.hyper.order == "mix_first" else carry["params"]
        return self.told({**state, "params": x}, {"model": x}, self.train_loss(carry, ctx), ctx)

    def mix(self, state: PublicCopies, received: Received, ctx: Context) -> State:
        mixed, mix_first = super().mix(state, received, ctx), self.hyper.order == "mix_first"
        return mixed if mix_first else {**mixed, "params": self.pulled("model", mixed["params"], mixed, ctx)}
