"""LotteryFL: Li et al., LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery Ticket
Hypothesis on Non-IID Datasets, 2020.

A client gets the entries of its mask from the server. If the accuracy of this model on the client's validation examples
is high enough, and the client still keeps more than the target share of its weights, it prunes the smallest of them and
resets the others to their initial values. It trains the entries that it keeps and sends them. The server takes the mean
of every entry over the clients that keep it, and leaves entries that no client keeps unchanged.

Where the sources are silent or the public code is wrong:
- The gate is the accuracy on a validation split; the code looks at the test data. The paper asks for an accuracy of
  0.5, the code for 0.2, which is the default.
- Only tensors of two or more dimensions are pruned, each by itself: those with |w| strictly below the quantile of the
  kept ones. The mask says which entries are kept; the code freezes every weight below 1e-6.
- A rewind takes all parameters back, biases included.
- Every client counts the same, once in each entry that it holds.
- A mask costs bits in the round in which it changes; both ends remember it. A client's model is the server's under the
  client's mask, and after local training the one that it has trained.
"""

from rayfl.methods.base import Capabilities, Context, Field, Finished, Message
from rayfl.methods.shared.accuracy_gate import GateHyper, Lottery, LotteryCarry, LotteryState
from rayfl.methods.shared.masked_server import WEIGHTS, MaskedServer, weights_packet


class LotteryFLHyper(GateHyper):
    """Hyper-parameters of LotteryFL, from its code."""

    lr: float = Field(default=0.01, gt=0, description="client learning rate")
    epochs: int | None = Field(default=None, ge=1, description="local epochs per round (10 where steps is not given)")
    batch_size: int = Field(default=10, ge=0, description="examples per batch, b; 0: the whole split")

    default_epochs = 10


class LotteryFL(Lottery, MaskedServer):
    """Client: gate, prune and rewind, train under the mask. Server: the mean over the clients that keep an entry."""

    hyper: LotteryFLHyper
    paper = "Li et al., 2020 (LotteryFL)"
    capabilities = Capabilities(on_device=True)

    def begin(self, state: LotteryState, received: Message, ctx: Context) -> LotteryCarry:
        return self.begin_from(received[WEIGHTS].decode(), state, ctx)

    def finish(self, state: LotteryState, carry: LotteryCarry, ctx: Context) -> Finished:
        return self.finished_with(weights_packet(carry["params"], carry["mask"], state["mask"]), carry, ctx)
