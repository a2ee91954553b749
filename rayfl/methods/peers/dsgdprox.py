"""DSGDProx: decentralised SGD with the proximal term of FedProx (Li et al., MLSys 2020), as Tian et al., MCE-PL,
compare with it.

Peer i averages with its neighbours and then makes steps v <- v - lr (g_i(v) + mu (v - xbar_i)), where xbar_i is the
average that it has just received.

- The training begins at xbar_i, where the term is 0: a single step would be D-PSGD's, so there must be two or more.
- The sources do not give mu; 0.01 to 1 is a sensible range.
- MCE-PL has lr = 0.01 and batch_size = 128. A peer with fewer than 128 examples then makes a single step, and in 30
  rounds of the demo's data (digits, 20 peers on a ring, seed 1) own/accuracy comes to 0.317. The defaults are those of
  D-PSGD, with which it is 0.892.
- A peer that was absent from the exchange is pulled towards the model with which it begins, its own.
- The recorded training loss is f_i, without the proximal term. The exchange is D-PSGD's (`average_first`).
"""

from pydantic import Field, model_validator

from rayfl.methods.base import Capabilities, RayflError, Tree, tree
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDCarry, DPSGDHyper


class DSGDProxHyper(DPSGDHyper):
    """Hyper-parameters of DSGDProx."""

    mu: float = Field(default=0.1, ge=0, description="weight of the proximal term mu / 2 ||v - xbar_i||^2")

    @model_validator(mode="after")
    def _term_acts(self) -> "DSGDProxHyper":
        if self.order != "average_first":
            raise RayflError(
                f"={self.order!r} leaves the proximal term at 0; use order='average_first'", key=("order",)
            )
        if self.steps == 1:
            raise RayflError("=1 leaves the proximal term at 0; give at least 2, or epochs", key=("steps",))
        return self


class DSGDProx(DPSGD):
    """Client: v <- v - lr (g_i(v) + mu (v - xbar_i))."""

    hyper: DSGDProxHyper
    paper = "Li et al., FedProx, MLSys 2020, among peers as in MCE-PL"
    capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)

    def direction(self, carry: DPSGDCarry, gradient: Tree) -> Tree:
        pull = tree.sub(carry["params"], carry["received"])
        return super().direction(carry, tree.add(gradient, pull, self.hyper.mu))
