"""TernGrad: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017,
Algorithm 1.

A client sends each tensor of its gradient as one number m = max |g| and the entries m * sign(g), kept with probability
|g| / m; the server averages. Every client has its own m (no scaler sharing), and the server sends the dense
model (the paper sends the averaged gradient to workers with a copy of the model).
"""

from rayfl.compress.quantize import TernGrad as Ternary
from rayfl.methods.base import Capabilities, Compressor, Field
from rayfl.methods.shared.distributed_gradient import CompressedSGD, GradientStep


class TernGradHyper(GradientStep):
    """Hyper-parameters of TernGrad."""

    clip: float = Field(
        default=0.0,
        ge=0,
        description="standard deviations to which a tensor's entries are clipped first (paper: 2.5); 0: none",
    )


class TernGrad(CompressedSGD):
    """Up: one byte for five entries and 4 bytes per tensor; unbiased unless clipped."""

    hyper: TernGradHyper
    paper = "Wen et al., TernGrad, NeurIPS 2017"
    capabilities = Capabilities(on_device=True, takes_stale=True)

    @property
    def compressor(self) -> Compressor:
        return Ternary(clip=self.hyper.clip)
