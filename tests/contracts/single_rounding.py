"""The operations of a server's update that round once, whatever computes them: a GPU then gives main memory's bits."""

# Any: torch's own signature.
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ROUND_ONCE = {"add", "sub", "mul", "_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_neg", "neg"}
ROUND_NEVER = {"zeros_like", "empty_like", "clone", "_to_copy", "copy_", "split", "_foreach_copy_"}
"""They make or move numbers; views move nothing."""


class Rounding(TorchDispatchMode):
    """As long as it lasts, it notes operations on tensors that may round more than once or differ by device."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []
        self.count = 0

    # Any: torch's own signature.
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        scale = kwargs.get("alpha", 1)
        self.count += 1
        # A scale of 1 or -1 changes no bit before the addition.
        is_exact = name.rstrip("_") in ROUND_ONCE and abs(scale) == 1
        if not (func.is_view or is_exact or name in ROUND_NEVER):
            self.refused.append(name if scale == 1 else f"{name} with alpha={scale}")
        return func(*args, **kwargs)
