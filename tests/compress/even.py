"""A generator whose draws are spread evenly, so that frequencies are probabilities exactly."""

from typing import Any

import numpy as np


class Even(np.random.Generator):
    """Entry j of m draws j / m of the range: of m equal entries with an m-th fraction k / m exactly k round up."""

    def __init__(self, count: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.count = count

    # Any: numpy's own signature has an overload for each type.
    def integers(self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, **_: Any) -> Any:
        assert (low, dtype) == (0, np.uint64) and high == 1 << 64
        draws = np.zeros(2 * size, np.uint32)
        draws[: self.count] = np.arange(self.count, dtype=np.uint64) * (2**32 // self.count)
        return draws.view(np.uint64)
