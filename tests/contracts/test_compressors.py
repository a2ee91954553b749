"""What every compressor must hold, whatever it does to the numbers."""

import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor
from rayfl.tree import Tree
from tests.contracts.every_compressor import (
    VARIANTS,
    assert_same,
    compressor_classes,
    encode,
    every_compressor,
    normal,
    ordinary,
)
from tests.pretended_gpu import PretendedGpu, on_gpu
from tests.refusals import refused
from tests.small_cases import small_cases

Property = Callable[[Compressor], None]
PROPERTIES: list[Property] = []


def held(check: Property) -> Property:
    """Mark what every compressor must hold."""
    PROPERTIES.append(check)
    return check


def test_the_room_is_found():
    assert {"dense", "topk", "feedback"} <= {compressor.name for compressor in VARIANTS}


def test_names_are_unique():
    names = [cls.name for cls in compressor_classes()]
    assert len(names) == len(set(names))


@held
def decode_has_the_names_and_shapes_of_the_input(compressor: Compressor):
    x = ordinary()
    decoded = encode(compressor, x)[0].decode()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in decoded.items()} == {
        name: (tensor.shape, torch.float32) for name, tensor in x.items()
    }
    assert all(torch.isfinite(tensor).all() for tensor in decoded.values())


@held
def decode_correlates_with_the_input(compressor: Compressor):
    # <C(v), v> > 0 for the identity, for top-k (it is ||C(v)||^2) and for roundings; 0 for zeros, about 0 for noise.
    # The sum of several draws, since a single one may send nothing.
    v = {"w": normal(3, 50, 40)}
    generator, decoded = np.random.default_rng(7), torch.zeros(50, 40)
    for _ in range(10):
        decoded += compressor.encode(v, compressor.init(v), generator)[0].decode()["w"]
    cosine = torch.cosine_similarity(decoded.flatten(), v["w"].flatten(), dim=0)
    # Even the coarsest operator here, one entry in ten by magnitude, keeps a third of the norm; 0.1 leaves room.
    assert cosine > 0.1


@held
def num_bits_is_the_size_of_the_buffers(compressor: Compressor):
    packet, _ = encode(compressor, ordinary())
    assert all(isinstance(part, np.ndarray) and part.ndim == 1 for part in packet.parts.values())
    assert packet.num_bits == 8 * sum(len(part.tobytes()) for part in packet.parts.values()) > 0


@held
@small_cases("x", [ordinary(), {}, {"empty": torch.zeros(0, 3)}, {"w": torch.zeros(5, 4)}])
def the_values_are_the_entries_that_the_receiver_sees(compressor: Compressor, x: Tree):
    packet, _ = encode(compressor, x)
    assert packet.num_values == sum(int(mask.sum()) for mask in packet.support().values())
    with PretendedGpu():
        assert encode(compressor, there(x))[0].num_values == packet.num_values


@held
def zero_stays_zero(compressor: Compressor):
    zero = {name: torch.zeros_like(tensor) for name, tensor in ordinary().items()}
    assert_same(encode(compressor, zero)[0].decode(), zero)


@held
@small_cases("value", [1.5, -2.0, 0.0])
def one_entry(compressor: Compressor, value: float):
    x = {"w": torch.tensor([value])}
    decoded = encode(compressor, x)[0].decode()["w"]
    assert decoded.shape == (1,)
    assert decoded.item() * value >= 0 and (value != 0 or decoded.item() == 0)


@held
def nothing_to_send(compressor: Compressor):
    packet, memory = encode(compressor, {})
    assert (packet.num_bits, packet.decode(), packet.support(), memory) == (0, {}, {}, {})


@held
@small_cases("bad", [math.nan, math.inf, -math.inf])
def refuses_what_is_not_finite_and_names_the_tensor(compressor: Compressor, bad: float):
    x = ordinary()
    x["fc.weight"][5, 7] = bad
    with refused(names=["fc.weight", "NaN"], error=ValueError):
        encode(compressor, x)


@held
def refuses_integers(compressor: Compressor):
    with refused(names=["steps", "torch.int64"]):
        encode(compressor, {"steps": torch.tensor([3])})


@held
def float64_is_sent_as_float32(compressor: Compressor):
    x = {"w": torch.from_numpy(np.random.default_rng(4).standard_normal(100))}
    rounded = {"w": x["w"].to(torch.float32)}
    assert_same(encode(compressor, x)[0].decode(), encode(compressor, rounded)[0].decode())


@held
def arguments_are_not_modified(compressor: Compressor):
    x = ordinary()
    memory = {name: torch.full_like(tensor, 0.25) for name, tensor in compressor.init(x).items()}
    before = {name: tensor.clone() for name, tensor in x.items()}
    remembered = {name: tensor.clone() for name, tensor in memory.items()}
    packet, _ = compressor.encode(x, memory, np.random.default_rng(7))
    packet.decode()
    assert_same(x, before)
    assert_same(memory, remembered)


@held
def memory_keeps_its_names_and_shapes(compressor: Compressor):
    x = ordinary()
    before, after = compressor.init(x), encode(compressor, x)[1]
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }


@held
def a_pickled_packet_decodes_the_same(compressor: Compressor):
    packet, _ = encode(compressor, ordinary())
    copy = pickle.loads(pickle.dumps(packet, protocol=5))  # noqa: S301 - our own bytes
    assert copy.num_bits == packet.num_bits
    assert_same(copy.decode(), packet.decode())
    assert_same(copy.support(), packet.support())


@held
def a_pickled_compressor_encodes_the_same(compressor: Compressor):
    copy = pickle.loads(pickle.dumps(compressor))  # noqa: S301 - our own bytes
    assert copy == compressor
    assert_same(encode(copy, ordinary())[0].decode(), encode(compressor, ordinary())[0].decode())


@held
@small_cases("weight", [1.0, -0.3, 0.0])
def add_to_adds_what_decode_gives(compressor: Compressor, weight: float):
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


@held
def nothing_arrives_outside_the_support(compressor: Compressor):
    packet, _ = encode(compressor, ordinary())
    decoded, support = packet.decode(), packet.support()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in support.items()} == {
        name: (tensor.shape, torch.bool) for name, tensor in decoded.items()
    }
    assert all((decoded[name][~mask] == 0).all() for name, mask in support.items())


@held
def same_generator_same_bytes(compressor: Compressor):
    (first, memory), (second, same_memory) = encode(compressor, ordinary()), encode(compressor, ordinary())
    assert {name: part.tobytes() for name, part in first.parts.items()} == {
        name: part.tobytes() for name, part in second.parts.items()
    }
    assert_same(memory, same_memory)


def there(x: Tree) -> Tree:
    """The tree on a pretended GPU."""
    return {name: on_gpu(tensor) for name, tensor in x.items()}


def ties() -> Tree:
    """Equal magnitudes, zeros of both signs, the largest and the smallest numbers."""
    numbers = [1.0, -1.0, 1.0, 0.0, -0.0, 1.0, -1.0, 2.0**-126, -(2.0**-149), 3.4028235e38, -2.5e38, 2.0**127]
    return {"w": torch.tensor(numbers).repeat(9).view(12, 9), "-0": torch.full((3, 2), -0.0), "sign": -torch.ones(7)}


@held
@small_cases("kind", ["ordinary", "long", "zeros", "ties", "double"])
def what_lies_on_a_gpu_has_the_bytes_of_main_memory(compressor: Compressor, kind: str):
    """Empty tensors and single numbers are among the ordinary ones."""
    x = {
        "ordinary": ordinary(),
        "long": {"w": torch.zeros(3000).index_fill_(0, torch.tensor([5, 2700]), 9.0), "v": normal(8, 1000)},
        "zeros": {name: torch.zeros_like(tensor) for name, tensor in ordinary().items()},
        "ties": ties(),
        "double": {"w": normal(3, 40, 5).double() / 3},
    }[kind]
    try:
        packet, memory = encode(compressor, x)
    except ValueError as error:
        # What overflows when it is scaled, or in 16 bits.
        assert kind == "ties"
        with PretendedGpu(), pytest.raises(ValueError) as raised:
            encode(compressor, there(x))
        assert str(raised.value) == str(error)
        return
    with PretendedGpu():
        other, new_memory = encode(compressor, there(x))
        # A dense packet makes its buffers where they are read.
        other = other.written()
        new_memory = {name: tensor.cpu() for name, tensor in new_memory.items()}
    assert list(packet.parts) == list(other.parts)
    for name, part in packet.parts.items():
        assert part.dtype == other.parts[name].dtype
        assert part.tobytes() == other.parts[name].tobytes(), name
    assert packet.codec == other.codec
    assert_same(other.decode(), packet.decode())
    assert_same(new_memory, memory)


@held
def a_gpu_and_main_memory_draw_as_much(compressor: Compressor):
    """So that the draws that follow are the same, too."""
    x, plain, other = ordinary(), np.random.default_rng(3), np.random.default_rng(3)
    compressor.encode(x, compressor.init(x), plain)
    with PretendedGpu():
        compressor.encode(there(x), compressor.init(x), other)
    assert plain.bit_generator.state == other.bit_generator.state


@held
@small_cases("bad", [math.nan, math.inf])
def what_is_not_finite_is_refused_on_a_gpu(compressor: Compressor, bad: float):
    x = ordinary()
    x["fc.weight"][5, 7] = bad
    with PretendedGpu(), refused(names=["fc.weight", "NaN", "infinity"], error=ValueError):
        encode(compressor, there(x))


@every_compressor
@small_cases("check", PROPERTIES)
def test_every_property_holds(compressor: Compressor, check: Property):
    check(compressor)
