"""What every compressor must hold. They are found by importing rayfl/compress/: a new one is tested by being there."""

import importlib
import inspect
import math
import pickle
import pkgutil
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

import rayfl.compress
from rayfl.compress.base import Compressor, Packet
from rayfl.compress.sparse import sparse_packet
from rayfl.tree import Tree, num_entries


def compressor_classes() -> list[type[Compressor]]:
    for module in pkgutil.iter_modules(rayfl.compress.__path__):
        importlib.import_module(f"rayfl.compress.{module.name}")
    pending, found = [Compressor], []
    while pending:
        for subclass in pending.pop().__subclasses__():
            pending.append(subclass)
            if subclass.__module__.startswith("rayfl.") and not inspect.isabstract(subclass):
                found.append(subclass)
    return sorted(found, key=lambda cls: cls.name)


def variants() -> Iterator[Compressor]:
    """Each class by default, with every choice of every Literal field, and around each plain compressor."""
    wrapping = {cls for cls in compressor_classes() for field in cls.model_fields.values() if _is_compressor(field)}
    for cls in compressor_classes():
        yield cls()
        for name, field in cls.model_fields.items():
            if get_origin(field.annotation) is Literal:
                yield from (cls(**{name: choice}) for choice in get_args(field.annotation) if choice != field.default)
            if _is_compressor(field):
                inner = (plain() for plain in compressor_classes() if plain not in wrapping)
                yield from (cls(**{name: plain}) for plain in inner if plain != field.default)


def _is_compressor(field) -> bool:
    return inspect.isclass(field.annotation) and issubclass(field.annotation, Compressor)


def label(compressor: Compressor) -> str:
    return repr(compressor).replace(" ", "")


VARIANTS = list(variants())
every_compressor = pytest.mark.parametrize("compressor", VARIANTS, ids=label)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def ordinary() -> Tree:
    """Ranks 0 to 4, sizes 0 and 1 included."""
    return {
        "conv.weight": normal(0, 4, 3, 2, 2),
        "conv.bias": normal(1, 4),
        "fc.weight": normal(2, 37, 11),
        "empty": torch.zeros(0, 3),
        "scale": torch.tensor(-0.75),
    }


def encode(compressor: Compressor, x: Tree) -> tuple[Packet, Tree]:
    return compressor.encode(x, compressor.init(x), np.random.default_rng(7))


def assert_same(a: Tree, b: Tree) -> None:
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def test_the_room_is_found():
    assert {"dense", "topk", "feedback"} <= {compressor.name for compressor in VARIANTS}


def test_names_are_unique():
    names = [cls.name for cls in compressor_classes()]
    assert len(names) == len(set(names))


@every_compressor
def test_decode_has_the_names_and_shapes_of_the_input(compressor: Compressor):
    x = ordinary()
    decoded = encode(compressor, x)[0].decode()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in decoded.items()} == {
        name: (tensor.shape, torch.float32) for name, tensor in x.items()
    }
    assert all(torch.isfinite(tensor).all() for tensor in decoded.values())


@every_compressor
def test_decode_correlates_with_the_input(compressor: Compressor):
    # <C(v), v> > 0 for the identity, for top-k (it is ||C(v)||^2) and for roundings; 0 for zeros, about 0 for noise.
    v = {"w": normal(3, 50, 40)}
    decoded = encode(compressor, v)[0].decode()
    cosine = torch.cosine_similarity(decoded["w"].flatten(), v["w"].flatten(), dim=0)
    # Even the coarsest operator here, one entry in ten by magnitude, keeps a third of the norm; 0.1 leaves room.
    assert cosine > 0.1


@every_compressor
def test_num_bits_is_the_size_of_the_buffers(compressor: Compressor):
    packet, _ = encode(compressor, ordinary())
    assert all(isinstance(part, np.ndarray) and part.ndim == 1 for part in packet.parts.values())
    assert packet.num_bits == 8 * sum(len(part.tobytes()) for part in packet.parts.values()) > 0


@every_compressor
def test_zero_stays_zero(compressor: Compressor):
    zero = {name: torch.zeros_like(tensor) for name, tensor in ordinary().items()}
    assert_same(encode(compressor, zero)[0].decode(), zero)


@every_compressor
@pytest.mark.parametrize("value", [1.5, -2.0, 0.0])
def test_one_entry(compressor: Compressor, value: float):
    x = {"w": torch.tensor([value])}
    decoded = encode(compressor, x)[0].decode()["w"]
    assert decoded.shape == (1,)
    assert decoded.item() * value >= 0 and (value != 0 or decoded.item() == 0)


@every_compressor
def test_nothing_to_send(compressor: Compressor):
    packet, memory = encode(compressor, {})
    assert (packet.num_bits, packet.decode(), packet.support(), memory) == (0, {}, {}, {})


@every_compressor
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite_and_names_the_tensor(compressor: Compressor, bad: float):
    x = ordinary()
    x["fc.weight"][5, 7] = bad
    with pytest.raises(ValueError, match=r"'fc\.weight'"):
        encode(compressor, x)


@every_compressor
def test_refuses_integers(compressor: Compressor):
    with pytest.raises(ValueError, match=r"'steps' is torch\.int64"):
        encode(compressor, {"steps": torch.tensor([3])})


@every_compressor
def test_float64_is_sent_as_float32(compressor: Compressor):
    x = {"w": torch.from_numpy(np.random.default_rng(4).standard_normal(100))}
    rounded = {"w": x["w"].to(torch.float32)}
    assert_same(encode(compressor, x)[0].decode(), encode(compressor, rounded)[0].decode())


@every_compressor
def test_arguments_are_not_modified(compressor: Compressor):
    x = ordinary()
    memory = {name: torch.full_like(tensor, 0.25) for name, tensor in compressor.init(x).items()}
    before = {name: tensor.clone() for name, tensor in x.items()}
    remembered = {name: tensor.clone() for name, tensor in memory.items()}
    packet, _ = compressor.encode(x, memory, np.random.default_rng(7))
    packet.decode()
    assert_same(x, before)
    assert_same(memory, remembered)


@every_compressor
def test_memory_keeps_its_names_and_shapes(compressor: Compressor):
    x = ordinary()
    before, after = compressor.init(x), encode(compressor, x)[1]
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }


@every_compressor
def test_a_pickled_packet_decodes_the_same(compressor: Compressor):
    packet, _ = encode(compressor, ordinary())
    copy = pickle.loads(pickle.dumps(packet, protocol=5))  # noqa: S301 - our own bytes
    assert copy.num_bits == packet.num_bits
    assert_same(copy.decode(), packet.decode())
    assert_same(copy.support(), packet.support())


@every_compressor
def test_a_pickled_compressor_encodes_the_same(compressor: Compressor):
    copy = pickle.loads(pickle.dumps(compressor))  # noqa: S301 - our own bytes
    assert copy == compressor
    assert_same(encode(copy, ordinary())[0].decode(), encode(compressor, ordinary())[0].decode())


@every_compressor
@pytest.mark.parametrize("weight", [1.0, -0.3, 0.0])
def test_add_to_adds_what_decode_gives(compressor: Compressor, weight: float):
    packet, _ = encode(compressor, ordinary())
    total = {name: normal(9, *tensor.shape) for name, tensor in ordinary().items()}
    decoded = packet.decode()
    wanted = {name: tensor.double() + weight * decoded[name].double() for name, tensor in total.items()}
    # The product and the sum round once each: 2^-24 of |weight * decoded| and of the result, plus float32(weight).
    slack = {
        name: 2**-22 * (tensor.double().abs() + (weight * decoded[name].double()).abs())
        for name, tensor in total.items()
    }
    packet.add_to(total, weight)
    for name, tensor in total.items():
        assert ((tensor.double() - wanted[name]).abs() <= slack[name]).all(), name


@every_compressor
def test_nothing_arrives_outside_the_support(compressor: Compressor):
    packet, _ = encode(compressor, ordinary())
    decoded, support = packet.decode(), packet.support()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in support.items()} == {
        name: (tensor.shape, torch.bool) for name, tensor in decoded.items()
    }
    assert all((decoded[name][~mask] == 0).all() for name, mask in support.items())


@every_compressor
def test_same_generator_same_bytes(compressor: Compressor):
    (first, memory), (second, same_memory) = encode(compressor, ordinary()), encode(compressor, ordinary())
    assert {name: part.tobytes() for name, part in first.parts.items()} == {
        name: part.tobytes() for name, part in second.parts.items()
    }
    assert_same(memory, same_memory)


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
