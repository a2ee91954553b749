"""CHOCO-SGD: Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication, ICML 2019, Algorithm 2 (gossip alone: Algorithm 1); with `order="mix_first"` the form of Koloskova, Lin,
Stich, Jaggi, Decentralized Deep Learning with Arbitrary Communication Compression, ICLR 2020, Algorithm 1.

Peer i has a model x_i, its public copy h_i, which its neighbours know too, and s_i = sum_j w_ij h_j (its own copy
included). A round: y_i = x_i after local training; q_i = C(y_i - h_i) goes to every neighbour; h_i += q_i;
s_i += sum_j w_ij q_j; x_i = y_i + gamma (s_i - h_i).

- `order="mix_first"` moves before it sends, by older copies: x_i = y_i + gamma (s_i - h_i), then q_i = C(x_i - h_i).
- sum_i x_i changes by local training alone, for any C and gamma: W is symmetric. With C the identity and gamma = 1,
  exchange_first is D-PSGD's average_first.
- The paper takes one step a round; here `epochs` or `steps` say how many.
- gamma is the uplink's delta unless given (papers tune it), 1 / (1 + omega) of an unbiased one, 0.1 if it states
  neither: gossip then converges on rings of 6 and of 20 peers. The theorem's step is far smaller: rho^2 delta /
  (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta), with rho the spectral gap of W and beta = ||I - W||.
- h_i begins at the common model, and not at the paper's 0 (`hats="zero"`): the first message is a difference, too.
- With a constant learning rate and unlike data the peers stay apart; `beer` brings them together.
- Each client may have a share of its own (`clients.retention_ratio`) with `topk`; gamma is then by the smallest delta.
- Copies agree at both ends only if every message arrives and all links stay. So dropouts, unavailable peers, graphs
  that change, and weights that are not symmetric are refused; so are error feedback and unbiased uplinks by client.
"""

from typing import Literal

from pydantic import Field

from rayfl.methods.base import Context, Finished, Received, State
from rayfl.methods.shared.gossip import CopiedStep, Gossip, PublicCopies
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork


class CHOCOHyper(LocalWork, CopiedStep):
    """Hyper-parameters of CHOCO-SGD; its mixing weights are the topology's."""

    order: Literal["exchange_first", "mix_first"] = Field(
        default="exchange_first",
        description="exchange_first: move by what arrives in this round; mix_first: by what arrived before it",
    )


class CHOCO(GradientMethod, Gossip, on_device=True, keeps_parts=True):
    """A peer sends the compressed difference between its model and what its neighbours know of it."""

    hyper: CHOCOHyper
    paper = "Koloskova et al., ICML 2019"

    def finish(self, state: PublicCopies, carry: LocalCarry, ctx: Context) -> Finished:
        x = self.pulled("model", carry["params"], state, ctx) if self.hyper.order == "mix_first" else carry["params"]
        return self.told({**state, "params": x}, {"model": x}, self.train_loss(carry, ctx), ctx)

    def mix(self, state: PublicCopies, received: Received, ctx: Context) -> State:
        mixed, mix_first = super().mix(state, received, ctx), self.hyper.order == "mix_first"
        return mixed if mix_first else {**mixed, "params": self.pulled("model", mixed["params"], mixed, ctx)}
