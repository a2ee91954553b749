"""FedSGD: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
section 2: E = 1 and B = infinity.

x <- x - eta sum_i p_i grad f_i(x): each client computes one gradient per round, at the model that it received, on the
whole train split (batch_size = 0) or on one minibatch. The result is that of FedAvg with one such step, but clients
send the gradient itself. A round in which nothing arrives changes nothing.
"""

from pydantic import Field

from rayfl.methods.base import Capabilities
from rayfl.methods.compressed.dcgd import DCGD, DCGDHyper
from rayfl.methods.shared.local_training import Weighting


class FedSGDHyper(DCGDHyper):
    """Hyper-parameters of FedSGD."""

    weighting: Weighting = Field(default="samples", description="weight of a client in the average")


class FedSGD(DCGD):
    """DCGD weighted by examples. Clients remember nothing except an uplink's own memory, if it has one."""

    hyper: FedSGDHyper
    paper = "McMahan et al., AISTATS 2017"
    capabilities = Capabilities(on_device=True, takes_stale=True)
