"""QSGD: Alistarh, Grubic, Li, Tomioka, Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding, NeurIPS 2017, Algorithm 1.

A client rounds every entry of its gradient at random to one of s levels of its bucket's 2-norm, without bias; the
server averages. The server sends the dense model (in the paper all peers broadcast their encoded gradients).
"""

from rayfl.compress import quantize
from rayfl.methods.base import Capabilities, Compressor, Field
from rayfl.methods.shared.distributed_gradient import CompressedSGD, GradientStep


class QSGDHyper(GradientStep):
    """Hyper-parameters of QSGD."""

    levels: quantize.Levels = Field(
        default=7, description="levels besides zero, s; 7: four bits per entry with its sign"
    )
    bucket: quantize.Bucket = 512
    coding: quantize.Coding = Field(
        default="fixed", description="fixed: equally many bits for each entry; elias: few bits for zeros"
    )


class QSGD(CompressedSGD):
    """Up: 1 + ceil(log2(s + 1)) bits per entry and 32 per bucket, or Elias codes; unbiased."""

    hyper: QSGDHyper
    paper = "Alistarh et al., QSGD, NeurIPS 2017"
    capabilities = Capabilities(on_device=True, takes_stale=True)

    @property
    def compressor(self) -> Compressor:
        return quantize.QSGD(levels=self.hyper.levels, bucket=self.hyper.bucket, coding=self.hyper.coding)
