"""The constants that compressors state (omega of the unbiased ones, delta of contractions) hold."""

import math

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor, Packet
from rayfl.compress.sparse import sparse_packet
from rayfl.tree import Tree, num_entries
from tests.contracts.every_compressor import VARIANTS, encode, label, normal, ordinary


def hard_inputs() -> dict[str, Tree]:
    """Where a wrong constant shows: equal entries are the worst case of top-k, wide ranges that of fixed steps."""
    wide = 10.0 ** np.random.default_rng(5).uniform(-30, 30, 300) * np.random.default_rng(6).choice([-1, 1], 300)
    sparse = normal(7, 1000) * (normal(8, 1000) > 1.5)
    return {
        "random": ordinary(),
        "sparse": {"w": sparse},
        "constant": {"w": torch.full((31,), -0.7), "b": torch.full((10,), -0.7)},
        "wide": {"w": torch.from_numpy(wide.astype(np.float32))},
        "one entry": {"w": torch.tensor([1 / 3])},
    }


def squared(x: Tree) -> float:
    return sum(float((tensor.double() ** 2).sum()) for tensor in x.values())


def error(packet: Packet, v: Tree) -> float:
    """||C(v) - v||^2 in float64."""
    decoded = packet.decode()
    return squared({name: decoded[name].double() - tensor.double() for name, tensor in v.items()})


CONTRACTIONS = [compressor for compressor in VARIANTS if compressor.delta(100) is not None]
UNBIASED = [compressor for compressor in VARIANTS if compressor.omega(100) is not None]


@pytest.mark.parametrize("kind", hard_inputs())
@pytest.mark.parametrize("compressor", CONTRACTIONS, ids=label)
def test_a_contraction_contracts(compressor: Compressor, kind: str):
    v = hard_inputs()[kind]
    delta = compressor.delta(num_entries(v))
    assert delta is not None and 0 < delta <= 1
    # 1e-12 for the float64 sums.
    assert error(encode(compressor, v)[0], v) <= (1 - delta + 1e-12) * squared(v)


def assert_unbiased(compressor: Compressor, v: Tree, draws: int = 1000) -> None:
    """With m the mean of R draws, E||m - v||^2 <= omega ||v||^2 / R, so by Markov's inequality it exceeds 20 times
    that with probability at most 1/20 for a true constant (the generator is fixed: it does or does not, for ever).
    The mean error of single draws may exceed omega ||v||^2 by five of its standard errors.
    The float32 entries themselves are worth 1e-12 of ||v||^2."""
    omega = compressor.omega(num_entries(v))
    assert omega is not None and omega >= 0
    generator = np.random.default_rng(11)
    mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in v.items()}
    errors = []
    for _ in range(draws):
        packet, _ = compressor.encode(v, {}, generator)
        errors.append(error(packet, v))
        packet.add_to(mean, 1 / draws)
    bias = squared({name: mean[name] - tensor.double() for name, tensor in v.items()})
    assert bias <= (20 * omega / draws + 1e-12) * squared(v)
    standard_error = float(np.std(errors)) / math.sqrt(draws)
    assert np.mean(errors) - 5 * standard_error <= (omega + 1e-12) * squared(v)


@pytest.mark.parametrize("kind", hard_inputs())
@pytest.mark.parametrize("compressor", UNBIASED, ids=label)
def test_an_unbiased_compressor_is_unbiased(compressor: Compressor, kind: str):
    assert_unbiased(compressor, hard_inputs()[kind])


class RandK(Compressor):
    """k = 10 entries at random, times `factor`: with factor n/k unbiased and omega = n/k - 1 exactly."""

    name = "randk-of-this-test"
    factor: float
    stated: float

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        mask = torch.zeros(40, dtype=torch.bool)
        mask[torch.from_numpy(generator.permutation(40)[:10])] = True
        return sparse_packet({"w": self.factor * x["w"]}, {"w": mask}), memory

    def omega(self, num_entries: int) -> float:
        return self.stated


def test_the_check_of_unbiasedness_can_pass_and_fail():
    v = {"w": normal(12, 40)}
    assert_unbiased(RandK(factor=4.0, stated=3.0), v)
    with pytest.raises(AssertionError):
        assert_unbiased(RandK(factor=1.0, stated=3.0), v)  # biased: the mean is v / 4
    with pytest.raises(AssertionError):
        assert_unbiased(RandK(factor=4.0, stated=2.5), v)  # unbiased, with too small a constant
