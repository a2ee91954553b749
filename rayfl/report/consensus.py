"""How far the final models of a run's peers lie apart."""

from contextlib import ExitStack

import numpy as np
from safetensors import SafetensorError, safe_open

from rayfl.limits.regular_files import require_regular
from rayfl.run_directory.record import Run
from rayfl.run_directory.saved_models import CONSTANTS, model_files


def consensus_distance(run: Run) -> float:
    """The root of (1/n) sum_i ||x_i - x||^2 over the n saved personal models x_i, with x their mean (Kong et al., ICML
    2021); NaN if fewer than two are saved, or if they have unlike parameters.

    Parameters that all clients share are saved once, and add nothing. A damaged file counts as missing.
    """
    sums: dict[str, np.ndarray] = {}
    squares = 0.0
    clients: set[str] = set()
    num_tensors = 0
    try:
        with ExitStack() as opened:
            for path in model_files(run.directory, "personal"):
                require_regular(path)
                models = opened.enter_context(safe_open(path, "numpy"))
                for key in models.keys():  # noqa: SIM118 (it is no dict)
                    client, _, name = key.partition("/")
                    if client == CONSTANTS:
                        continue
                    values = models.get_tensor(key).astype(np.float64)
                    total = sums.setdefault(name, np.zeros_like(values))
                    if total.shape != values.shape:
                        return np.nan
                    total += values
                    squares += float(np.square(values).sum())
                    clients.add(client)
                    num_tensors += 1
    except (OSError, ValueError, SafetensorError):
        return np.nan
    count = len(clients)
    if count < 2 or num_tensors != count * len(sums):
        return np.nan
    mean_square = sum(float(np.square(total / count).sum()) for total in sums.values())
    return float(np.sqrt(max(0.0, squares / count - mean_square)))
