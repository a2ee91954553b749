"""LotteryDSGD: LotteryFL (Li et al., LotteryFL: Personalized and Communication-Efficient Federated Learning with
Lottery Ticket Hypothesis on Non-IID Datasets, 2020) among peers, as Tian et al., MCE-PL, compare with it.

A peer whose accuracy on its validation examples is high enough prunes the smallest of the weights that it keeps and
resets the others to their initial values. It trains the entries that it keeps and sends them. Every entry of its mask
then becomes the mean over the neighbours (itself included) that keep the entry.

Where the sources are silent or the public code is wrong:
- The gate is the accuracy on a validation split; LotteryFL's code looks at the test data.
- Only tensors of two or more dimensions are pruned, each by itself; the mask says which entries are kept.
- A rewind takes all parameters back, biases included.
- A round here ends with the exchange; all start from one model, so none is missing.
- MCE-PL has batch_size = 128. In 30 rounds of the demo's data (digits, 20 peers on a ring, seed 1), where a peer has
  fewer examples, own/accuracy is 0.577 with 128 and 0.799 with the default.
"""

from rayfl.compress.sparse import sparse_packet
from rayfl.methods.base import Capabilities, Context, ElementwiseMean, Field, Finished, Message, PeerHalf, Received
from rayfl.methods.shared import masks
from rayfl.methods.shared.accuracy_gate import GateHyper, Lottery, LotteryCarry, LotteryState


class LotteryDSGDHyper(GateHyper):
    """Hyper-parameters of LotteryDSGD: MCE-PL's learning rate; the rest is LotteryFL's except the batch size."""

    lr: float = Field(default=0.1, gt=0, description="client learning rate")


class LotteryDSGD(Lottery, PeerHalf):
    """LotteryFL's client, which averages the entries of its mask over the neighbours that keep them."""

    hyper: LotteryDSGDHyper
    paper = "Li et al., LotteryFL, 2020, among peers as in MCE-PL"
    capabilities = Capabilities(on_device=True, takes_stale=True)
    gather = {"weights": ElementwiseMean("sent")}

    def begin(self, state: LotteryState, received: Message, ctx: Context) -> LotteryCarry:
        return self.begin_from(state["params"], state, ctx)

    def finish(self, state: LotteryState, carry: LotteryCarry, ctx: Context) -> Finished:
        return self.finished_with(sparse_packet(carry["params"], carry["mask"]), carry, ctx)

    def mix(self, state: LotteryState, received: Received, ctx: Context) -> LotteryState:
        # A peer receives its own message too, so at least one sender keeps each entry of its mask.
        average = received["weights"].result if received else state["params"]
        return {**state, "params": masks.masked(average, state["mask"])}
