"""Tasks bound to networks, for tests."""

from collections.abc import Callable

from torch import nn

from rayfl.determinism.process import ArithmeticPrecision
from rayfl.models.base import MemoryFormat
from rayfl.network import Network
from rayfl.task import NetworkTask
from rayfl.tasks.supervised import Classification


def classification(
    build: Callable[[], nn.Module],
    input_shape: tuple[int, ...] | None = None,
    memory_format: MemoryFormat = "contiguous",
    precision: ArithmeticPrecision = "fp32",
) -> NetworkTask:
    """Classification by the network that `build` makes."""
    return NetworkTask(Network(build, input_shape, memory_format, precision), Classification())
