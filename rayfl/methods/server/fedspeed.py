"""FedSpeed: Sun, Shen, Huang, Ding, Tao, FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy, ICLR 2023, Algorithm 1.

FedDyn with gradients uphill. Client i keeps h_i, the sum of its x - y_i so far, and its step from the received x goes
along

(1 - alpha) g_i(y) + alpha g_i(y + rho g_i(y) / ||g_i(y)||) + lam (y - x - h_i).

It sends delta_i = x - y_i and adds it to h_i; the server moves x <- x - mean_S delta_i - h, with h = mean_i h_i over
all N clients. rho = 0 is FedDyn with its alpha = lam, whoever takes part. FedDyn's page says what holds of h, h_i and
the evaluated model.

- Paper and authors' code differ, and this is the code: the mean of the h_i is over all clients (paper: over the
  participants), the ascent is divided by the gradient's norm (paper: rho g_i(y)), and alpha = 1 by default.
- `lam` multiplies the proximal term; the paper writes 1 / (2 lambda) ||y - x||^2, so its lambda is 1 / lam.
- lam = 0.1 and rho = 0.1 are those of the code.
- The sign of h_i is FedDyn's, minus that of the authors' code.
- A step takes two gradients of its batch. The recorded training loss is f_i(y), without perturbation and other terms.
"""

from rayfl.methods.base import Capabilities, Field, Tree, tree
from rayfl.methods.server.feddyn import FedDyn, FedDynHyper
from rayfl.methods.shared.sharpness import Sharpness, SharpnessAware


class FedSpeedHyper(FedDynHyper, Sharpness):
    """Hyper-parameters of FedSpeed."""

    alpha: float = Field(
        default=1.0, ge=0, le=1, description="share of the gradient uphill in a step's gradient, alpha"
    )
    lam: float = Field(default=0.1, gt=0, description="strength of the regularization; the paper's lambda is 1 / lam")


class FedSpeed(SharpnessAware, FedDyn):
    """Down: x. Up: delta_i. Client state: h_i."""

    hyper: FedSpeedHyper
    paper = "Sun et al., ICLR 2023"
    capabilities = Capabilities(on_device=True)

    @property
    def strength(self) -> float:
        return self.hyper.lam

    def mixed(self, gradient: Tree, uphill: Tree) -> Tree:
        share = self.hyper.alpha
        return uphill if share == 1 else tree.add(tree.scale(gradient, 1 - share), uphill, share)
