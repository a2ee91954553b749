"""pFedMac: Li et al., Personalized Federated Learning via Maximizing Correlation with Sparse and Hierarchical
Extensions, 2021 (arXiv 2107.05330), without its sparsity.

pFedMe with an inner product instead of the distance between theta and w: theta approximates the minimiser of
f_i(theta) - lam <theta, w> + lam / 2 ||w||^2, so that its steps go along g(theta; D_r) - lam w. The step of w is
along the gradient in w of the same function, lam (w - theta), as in pFedMe; all the rest is pFedMe's too.

Theta's objective is unbounded below if f_i does not grow quadratically, and the cross-entropy does not: theta then
diverges along w, the faster the larger lam is, and w follows. Therefore theta takes a fixed number K of steps and does
not approach the minimiser; `weight_decay` is 0.001 by default; and lam is 0.1 (public code takes pFedMe's 15). With
such a small lam eta must be as large as 0.5 for w to move: a step goes eta lam = 0.05 of the way, in pFedMe 0.075. With
weight_decay = lam theta's steps are those of pFedMe.
"""

from rayfl.methods.base import Capabilities, Field, tree
from rayfl.methods.personal.pfedme import PFedMe, PFedMeHyper


class PFedMacHyper(PFedMeHyper):
    """Hyper-parameters of pFedMac: pFedMe's, with a small lam and a weight decay by default."""

    lr: float = Field(default=0.5, gt=0, description="step size of w, eta")
    lam: float = Field(default=0.1, gt=0, description="weight of the inner product of theta and w, lambda")
    personal_lr: float = Field(default=0.1, gt=0, description="step size of theta, the same in all rounds")
    weight_decay: float = Field(default=1e-3, ge=0, description="L2 penalty on theta, which keeps it from running away")

    @property
    def inner_curvature(self) -> float:
        return self.weight_decay


class PFedMac(PFedMe):
    """Client: theta <- theta - personal_lr (g - lam w), K times; w <- w - eta lam (w - theta)."""

    hyper: PFedMacHyper
    paper = "Li et al., 2021 (pFedMac)"
    capabilities = Capabilities(on_device=True)

    def binding(self, theta: tree.Tree, w: tree.Tree) -> tree.Tree:
        return tree.scale(w, -self.hyper.lam)
