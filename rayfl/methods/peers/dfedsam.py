"""DFedSAM: Shi, Shen, Wei, Sun, Yuan, Wang, Tao, Improving the Model Consistency of Decentralized Federated Learning,
ICML 2023, Algorithm 1; with several exchanges, DFedSAM-MGS. The steps are SAM's: Foret, Kleiner, Mobahi, Neyshabur,
ICLR 2021.

A step: g = g_i(y), then g' = g_i(y + rho g / ||g||) on the same batch, and y <- y - eta g'. After the steps Q exchanges
with the same weights: x = W^Q y.

- The norm is that of all parameters together; where g is 0 nothing is perturbed. Clipping, momentum and weight decay
  apply to g'. A step takes two gradients, and the simulated clock and the count of operations know it.
- With rho = 0 and Q = 1 this is decentralised FedAvg, `dpsgd`.
- Each of the Q exchanges is billed and takes time; in those after the first a message is what its sender has mixed
  up to then. The simulation gathers all Q at once, by the weights W^Q. With Q above 1 an uplink with loss is refused.
- A peer that is absent is absent from all Q exchanges, and continues with its own model.
- rho = 0.05 is the default of SAM's authors; Q = 1 is ours.
- Peers on their own clocks have one exchange; Q above 1 is refused there.
- With a constant rho the steps do not rest at the minimiser.
"""

from typing import Any

from rayfl.methods.base import BoundTask, Capabilities, Field, HyperParameters
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDHyper
from rayfl.methods.shared.sharpness import Sharpness, SharpnessAware
from rayfl.topology.mixing import Exchange, Sparse


class DFedSAMHyper(DPSGDHyper, Sharpness):
    """Hyper-parameters of DFedSAM; its mixing weights are the topology's."""

    rho: float = Field(default=0.05, ge=0, description="radius of the perturbation, rho")
    exchanges: int = Field(default=1, ge=1, description="exchanges per round with the same weights, Q")

    def unused(self) -> dict[str, str]:
        others = {"order": "as DFedSAM trains before it mixes", "density": "as DFedSAM has no masks"}
        return {**super().unused(), **others}


class DFedSAM(SharpnessAware, DPSGD):
    """D-PSGD whose steps follow the gradient at a perturbed point."""

    hyper: DFedSAMHyper
    paper = "Shi et al., ICML 2023"
    capabilities = Capabilities(on_device=True, takes_stale=True)

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(task, hyper, **settings)
        self.capabilities = self.capabilities.but(
            num_exchanges=self.hyper.exchanges, takes_stale=self.hyper.exchanges == 1
        )

    def mixing(self, weights: Sparse, exchange: Exchange) -> Sparse:
        mixed = weights
        for _ in range(1, self.hyper.exchanges):
            mixed = mixed @ weights
        return mixed.tocsr()
