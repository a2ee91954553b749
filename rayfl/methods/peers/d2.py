"""D2: Tang, Lian, Yan, Zhang, Liu, D2: Decentralized Training over Decentralized Data, ICML 2018, Algorithm 1; the same
iterates as exact diffusion (Yuan, Ying, Zhao, Sayed, IEEE TSP 2019).

x^{t+1} = W (2 x^t - x^{t-1} - eta (g^t - g^{t-1})), with x^1 = W (x^0 - eta g^0). A round is one step, with stored
gradients.

- It is `led` with K = 1, c_i being the sum of (phi_i - x_i) / eta: phi_i = x_i - eta (g_i + c_i). For a constant eta
  these are the paper's iterates. When eta changes, the paper's form leaves the minimiser, and this one does not.
- The notes of `led` on W, `lazy`, absent peers and compressors hold here, too.
- The paper prints x^{-1} = 0, which fits x^0 = 0 alone; here x^{-1} = x^0 and g^{-1} = 0.
"""

from typing import ClassVar

from rayfl.methods.base import Capabilities, Field
from rayfl.methods.peers.led import LED, LEDHyper


class D2Hyper(LEDHyper):
    """Hyper-parameters of D2; its mixing weights are the topology's."""

    default_steps: ClassVar[int | None] = 1
    steps: int | None = Field(default=None, ge=1, le=1, description="local steps per round: 1; led takes more")


class D2(LED):
    """LED with one step per round."""

    hyper: D2Hyper
    paper = "Tang et al., ICML 2018"
    capabilities = Capabilities(on_device=True)
