"""The constants that compressors state (omega of the unbiased ones, delta of contractions) hold."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor, Packet, Quantizer
from rayfl.compress.sparse import sparse_packet
from rayfl.tree import Tree, num_entries
from tests.contracts.every_compressor import VARIANTS, encode, label, normal, ordinary
from tests.small_cases import small_cases


@functools.cache
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
        "zero": {"w": torch.zeros(50), "b": torch.zeros(1)},
    }


def squared(x: Tree) -> float:
    return sum(float((tensor.double() ** 2).sum()) for tensor in x.values())


def error(decoded: Tree, v: Tree) -> float:
    """||C(v) - v||^2 in float64."""
    return squared({name: decoded[name].double() - tensor.double() for name, tensor in v.items()})


class Draws(NamedTuple):
    """What independent draws of C(v) come to."""

    errors: list[float]
    """||C(v) - v||^2 of each."""
    bias: float
    """||m - v||^2 with m the mean of the decoded vectors."""


def draw(compressor: Compressor, v: Tree, draws: int) -> Draws:
    """Encode `v` again and again, by one generator; all sums are in float64."""
    generator, wanted, errors = np.random.default_rng(11), entries(v), []
    mean = np.zeros_like(wanted)
    for _ in range(draws):
        decoded = compressor.encode(v, {}, generator)[0].decode()
        found = entries({name: decoded[name] for name in v})
        errors.append(float(((found - wanted) ** 2).sum()))
        mean += found / draws
    return Draws(errors, float(((mean - wanted) ** 2).sum()))


def entries(x: Tree) -> np.ndarray:
    """All entries, float64."""
    return np.concatenate([tensor.numpy().ravel() for tensor in x.values()], dtype=np.float64)


@functools.cache
def drawn(name: str, kind: str) -> Draws:
    """The draws of the compressor under contract of this label, which several tests evaluate."""
    return draw(LABELLED[name], hard_inputs()[kind], DRAWS)


CONTRACTIONS = [compressor for compressor in VARIANTS if compressor.delta(100) is not None]
UNBIASED = [compressor for compressor in VARIANTS if compressor.omega(100) is not None]
LABELLED = {label(compressor): compressor for compressor in VARIANTS}
DRAWS = 200
ROUNDING = 2.0**-22
"""What rounding decoded numbers to float32 may add to ||C(v)||^2, relatively: 2^-23 and a little."""


@pytest.mark.parametrize("compressor", CONTRACTIONS, ids=label)
@small_cases("kind", hard_inputs())
def test_a_contraction_contracts(compressor: Compressor, kind: str):
    v = hard_inputs()[kind]
    delta = compressor.delta(num_entries(v))
    assert delta is not None and 0 < delta <= 1
    # 1e-12 for the float64 sums.
    assert error(encode(compressor, v)[0].decode(), v) <= (1 - delta + 1e-12) * squared(v)


def assert_contracts_on_average(compressor: Compressor, v: Tree, errors: list[float]) -> None:
    """The mean error of single draws may exceed (1 - delta) ||v||^2 by five of its standard errors: by chance that
    happens once in 3 million times where the mean is nearly normal. The generator is fixed."""
    delta = compressor.expected_delta(num_entries(v))
    assert delta is not None and 0 < delta <= 1
    standard_error = float(np.std(errors)) / math.sqrt(len(errors))
    assert np.mean(errors) - 5 * standard_error <= (1 - delta + ROUNDING) * squared(v)


def expected_contractions() -> Iterator[tuple[Compressor, str]]:
    """Where one is stated that holds on average only, or more than the one for every draw. With more entries than that
    (an omega of 1 and above) none may be left."""
    for compressor in VARIANTS:
        for kind, v in hard_inputs().items():
            delta = compressor.expected_delta(num_entries(v))
            if delta is not None and delta > (compressor.delta(num_entries(v)) or 0.0):
                yield compressor, kind


@pytest.mark.parametrize(("compressor", "kind"), list(expected_contractions()), ids=label)
def test_a_contraction_in_expectation_contracts_on_average(compressor: Compressor, kind: str):
    assert_contracts_on_average(compressor, hard_inputs()[kind], drawn(label(compressor), kind).errors)


@pytest.mark.parametrize("compressor", VARIANTS, ids=label)
def test_expectation_never_says_less_than_the_other_constants(compressor: Compressor):
    for n in (1, 2, 40, 1000):
        delta, omega, expected = compressor.delta(n), compressor.omega(n), compressor.expected_delta(n)
        if delta is not None:
            assert expected is not None and expected >= delta
        if omega is not None and omega < 1:
            assert expected is not None and expected >= 1 - omega


QUANTIZERS = [compressor for compressor in VARIANTS if isinstance(compressor, Quantizer)]


@pytest.mark.parametrize("compressor", QUANTIZERS, ids=label)
def test_constants_of_quantizers_only_get_worse_with_size(compressor: Quantizer):
    sizes = [1, 2, 3, 5, 8, 100, 511, 512, 513, 10_000]
    omegas = [omega for n in sizes if (omega := compressor.omega(n)) is not None]
    deltas = [delta for n in sizes if (delta := compressor.delta(n)) is not None]
    assert omegas == sorted(omegas) and len(omegas) in (0, len(sizes))
    assert deltas == sorted(deltas, reverse=True) and len(deltas) in (0, len(sizes))


def assert_unbiased(compressor: Compressor, v: Tree, given: Draws) -> None:
    """With m the mean of R draws, E||m - v||^2 <= omega ||v||^2 / R, so by Markov's inequality it exceeds 20 times
    that with probability at most 1/20 for a true constant (the generator is fixed: it does or does not, for ever).
    The mean error of single draws may exceed omega ||v||^2 by five of its standard errors.
    The float32 entries themselves are worth 1e-12 of ||v||^2."""
    omega, draws = compressor.omega(num_entries(v)), len(given.errors)
    assert omega is not None and omega >= 0
    assert given.bias <= (20 * omega / draws + 1e-12) * squared(v)
    standard_error = float(np.std(given.errors)) / math.sqrt(draws)
    assert np.mean(given.errors) - 5 * standard_error <= (omega + ROUNDING * (1 + omega)) * squared(v)


@pytest.mark.parametrize("compressor", UNBIASED, ids=label)
@small_cases("kind", hard_inputs())
def test_an_unbiased_compressor_is_unbiased(compressor: Compressor, kind: str):
    assert_unbiased(compressor, hard_inputs()[kind], drawn(label(compressor), kind))


class RandK(Compressor):
    """k = 10 entries at random, times `factor`: with factor n/k unbiased and omega = n/k - 1 exactly."""

    name = "randk-of-this-test"
    factor: float
    stated: float = 0.0
    contracts: float | None = None

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        mask = torch.zeros(40, dtype=torch.bool)
        mask[torch.from_numpy(generator.permutation(40)[:10])] = True
        return sparse_packet({"w": self.factor * x["w"]}, {"w": mask}), memory

    def omega(self, num_entries: int) -> float:
        return self.stated

    def expected_delta(self, num_entries: int) -> float | None:
        return self.contracts


def test_the_check_of_unbiasedness_can_pass_and_fail():
    v = {"w": normal(12, 40)}

    def check(compressor: Compressor) -> None:
        assert_unbiased(compressor, v, draw(compressor, v, DRAWS))

    check(RandK(factor=4.0, stated=3.0))
    with pytest.raises(AssertionError):
        check(RandK(factor=1.0, stated=3.0))  # biased: the mean is v / 4
    with pytest.raises(AssertionError):
        check(RandK(factor=4.0, stated=2.5))  # unbiased, with too small a constant


def test_the_check_of_contraction_on_average_can_pass_and_fail():
    # Unscaled, 30 of 40 entries are lost, 3/4 of ||v||^2 on average: of some v more is lost than that in some draw.
    v = {"w": normal(12, 40)}

    def check(compressor: Compressor) -> None:
        assert_contracts_on_average(compressor, v, draw(compressor, v, DRAWS).errors)

    check(RandK(factor=1.0, contracts=0.25))
    with pytest.raises(AssertionError):
        check(RandK(factor=1.0, contracts=0.3))
    with pytest.raises(AssertionError):
        check(RandK(factor=4.0, contracts=0.25))  # scaled, the error is 3 ||v||^2
