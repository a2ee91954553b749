"""The saved personal models of a run, and how far those of peers lie apart."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
from safetensors import SafetensorError, safe_open

from rayfl.limits.regular_files import require_regular
from rayfl.run_directory.record import Run
from rayfl.run_directory.saved_models import CONSTANTS, model_files
from rayfl.untyped import Foreign

UNREADABLE = (OSError, ValueError, SafetensorError)
"""What `personal_models` raises for a damaged file."""


@contextmanager
def personal_models(run: Run, first_file: bool = False) -> Iterator[dict[str, Foreign]]:
    """Context manager: the open file of each tensor of the saved personal models, by its name: CLIENT/NAME.

    first_file: only those of the first clients.
    """
    with ExitStack() as opened:
        files = {}
        for path in model_files(run.directory, "personal")[: 1 if first_file else None]:
            require_regular(path)
            models = opened.enter_context(safe_open(path, "numpy"))
            files |= dict.fromkeys(models.keys(), models)
        yield files


def shape_of(files: Mapping[str, Foreign], name: str) -> tuple[int, ...]:
    """The shape of a tensor of `personal_models`."""
    return tuple(files[name].get_slice(name).get_shape())


def consensus_distance(run: Run) -> float:
    """The root of (1/n) sum_i ||x_i - x||^2 over the n saved personal models x_i, with x their mean (Kong et al., ICML
    2021); NaN if fewer than two are saved, or if they have unlike parameters.

    Parameters that all clients share are saved once, and add nothing. A damaged file counts as missing.
    """
    squares = 0.0
    try:
        with personal_models(run) as files:
            own = [key for key in files if not key.startswith(f"{CONSTANTS}/")]
            clients = dict.fromkeys(key.partition("/")[0] for key in own)
            shapes = dict.fromkeys((key.partition("/")[2], shape_of(files, key)) for key in own)
            if len(clients) < 2 or len(own) != len(clients) * len(shapes):
                return np.nan
            for name, shape in shapes:
                total = np.zeros(shape)
                for client in clients:
                    values = files[f"{client}/{name}"].get_tensor(f"{client}/{name}").astype(np.float64)
                    total += values
                    squares += float(np.square(values).sum()) / len(clients)
                squares -= float(np.square(total / len(clients)).sum())
    except UNREADABLE:
        return np.nan
    return float(np.sqrt(max(0.0, squares)))
