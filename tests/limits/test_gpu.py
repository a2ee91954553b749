"""What the processes that share a GPU may take of its memory."""

import pytest

from rayfl.limits.memory import CONTEXT_BYTES, tensor_fraction
from tests.refusals import refused

H100 = 80 * 10**9


@pytest.mark.parametrize(("share", "processes"), [(1, 1), (2, 1), (0.5, 2), (0.33, 3), (1 / 3, 3), (0.3, 3), (0.1, 10)])
def test_all_actors_of_a_gpu_fit_with_their_contexts(share: float, processes: int):
    fraction = tensor_fraction(share, H100)
    assert processes * (fraction * H100 + CONTEXT_BYTES) == pytest.approx(H100)


def test_a_share_that_leaves_nothing_for_tensors_is_refused():
    with refused(names=["runtime.num_gpus=0.01", "100", "GPU", "80.0 GB", "800.0 MB"]):
        tensor_fraction(0.01, H100)
    assert tensor_fraction(0.05, H100) == pytest.approx(0.05 - CONTEXT_BYTES / H100)
