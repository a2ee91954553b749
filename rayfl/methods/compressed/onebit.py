"""1-bit SGD: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs, Interspeech 2014, section 3.2.

A client sends the signs of p_i = lr g_i + e_i and, for every group of entries, the mean of the positive and of the
negative ones; the rest, e_i = p_i - C(p_i), is added to its next message. The server averages.

Where we differ: the error is kept in units of the model (lr is inside, so that a change of lr does not rescale the
error), the server steps without AdaGrad, and it sends the dense model (the paper also quantises the aggregate that
goes back, with an error memory per worker). Groups are those of the compressor `onebit`.
"""

from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sign import OneBit
from rayfl.methods.base import Capabilities, Compressor, Field
from rayfl.methods.shared.distributed_gradient import CompressedSGD, GradientStep


class OneBitHyper(GradientStep):
    """Hyper-parameters of 1-bit SGD."""

    error_feedback: bool = Field(default=True, description="add the rest to the next message (false: ablation)")


class OneBitSGD(CompressedSGD):
    """Up: d bits and 64 a group; client state: the error e_i."""

    hyper: OneBitHyper
    paper = "Seide et al., 1-Bit SGD, Interspeech 2014"
    capabilities = Capabilities(on_device=True)

    @property
    def compressor(self) -> Compressor:
        return ErrorFeedback(inner=OneBit()) if self.hyper.error_feedback else OneBit()
