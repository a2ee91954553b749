"""Local: every client trains alone and nothing is sent: the baseline of personalized methods.

No paper; Algorithm 1 of FedAvg (McMahan et al., AISTATS 2017) without its averaging.
"""

from rayfl.methods.base import Capabilities, Context, Finished, ModelState, PeerHalf
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, OwnModel


class Local(OwnModel, GradientMethod, PeerHalf):
    """Every client trains its own model from the common initial model; the optimizer state is new in every round."""

    hyper: LocalWork
    paper = "no communication; the baseline of personalized methods"
    capabilities = Capabilities(on_device=True, keeps_parts=True, own_compression=True)

    def finish(self, state: ModelState, carry: LocalCarry, ctx: Context) -> Finished:
        return Finished({"params": carry["params"]}, None, 1.0, self.train_loss(carry, ctx))
