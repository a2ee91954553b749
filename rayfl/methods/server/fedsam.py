"""FedSAM: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022, Algorithm 1;
Caldarola, Caputo, Ciccone, Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

Clients look for flat minima. A local step takes a gradient g = g_i(y), and then goes along the gradient of the same
batch at the point uphill: y <- y - eta_l g_i(y + rho g / (||g|| + 1e-12)). The rest is FedAvg, and rho = 0 is FedAvg
itself.

- The norm is over the whole model. Caldarola et al. also have a variant with a norm scaled by the parameters (ASAM),
  which is not built.
- `clip_norm` bounds the second gradient, and weight decay acts on y.
- rho = 0.1 is the authors' code; Qu et al. search from 0.001 to 0.5.
- The recorded training loss is f_i(y), without the perturbation. A step takes two gradients of its batch.
"""

from rayfl.methods.base import Capabilities
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.methods.shared.sharpness import Sharpness, SharpnessAware


class FedSAMHyper(LocalTraining, Sharpness):
    """Hyper-parameters of FedSAM."""


class FedSAM(SharpnessAware, FedAvg):
    """Client: y <- y - eta_l g_i(y + rho g_i(y) / ||g_i(y)||). Messages and server are FedAvg's."""

    hyper: FedSAMHyper
    paper = "Qu et al., ICML 2022"
    capabilities = Capabilities(on_device=True, server_on_device=True, takes_stale=True)
