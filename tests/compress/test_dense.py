"""Dense packets: rounding, ranges, aliasing and alignment."""

import pickle
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.compress.base import BLOCK, Packet, message_bits
from rayfl.compress.dense import Dense, DenseDifference
from rayfl.compress.values import ValueType
from rayfl.tree import Difference, Tree
from tests.pretended_gpu import PretendedGpu, on_gpu
from tests.refusals import refused

RNG = np.random.default_rng(0)


def sent(values: list[float], dtype: ValueType) -> list[float]:
    packet, _ = Dense(dtype=dtype).encode({"w": torch.tensor(values)}, {}, RNG)
    return packet.decode()["w"].tolist()


def test_bits_are_32_or_16_an_entry():
    x = {"w": torch.ones(7, 3), "b": torch.ones(2)}
    bits = {dtype: Dense(dtype=dtype).encode(x, {}, RNG)[0].num_bits for dtype in get_args(ValueType)}
    assert bits == {"fp32": 32 * 23, "fp16": 16 * 23, "bf16": 16 * 23}


def test_message_bits_adds_the_packets():
    packet, _ = Dense().encode({"w": torch.ones(3)}, {}, RNG)
    assert message_bits({"model": packet, "control_variate": packet}) == 2 * 96


def test_fp32_looks_at_the_tensor_and_forbids_writing():
    x = torch.arange(6.0).reshape(2, 3)
    packet, _ = Dense().encode({"w": x}, {}, RNG)
    assert np.shares_memory(packet.parts["w"], x.numpy())
    assert not packet.parts["w"].flags.writeable


def test_fp32_decodes_an_aligned_buffer_without_a_copy():
    packet, _ = Dense().encode({"w": torch.ones(100)}, {}, RNG)
    assert packet.decode()["w"].data_ptr() == packet.parts["w"].ctypes.data


def test_fp32_copies_a_buffer_off_the_64_byte_grid():
    # A linear layer on data 4 bytes off gives other bits than on torch's own memory.
    x = torch.arange(101.0)[1:]
    packet, _ = Dense().encode({"w": x}, {}, RNG)
    assert packet.parts["w"].ctypes.data % 64 == 4
    decoded = packet.decode()["w"]
    assert decoded.data_ptr() % 64 == 0 and torch.equal(decoded, x)


def test_entries_are_sent_row_by_row_whatever_the_strides():
    transposed = torch.arange(6.0).reshape(2, 3).T
    channels_last = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    packet, _ = Dense().encode({"t": transposed, "c": channels_last}, {}, RNG)
    assert packet.parts["t"].tolist() == [0, 3, 1, 4, 2, 5]
    assert packet.parts["c"].tolist() == list(range(24))
    assert torch.equal(packet.decode()["t"], transposed)


def test_gradients_are_no_part_of_a_packet():
    packet, _ = Dense().encode({"w": torch.ones(2, requires_grad=True)}, {}, RNG)
    assert not packet.decode()["w"].requires_grad


def test_bf16_rounds_to_nearest_even():
    # 7 fraction bits: 1 + 1/256 lies half way between 1 (even) and 1 + 1/128; 1 + 3/256 between 1 + 1/128 (odd) and
    # 1 + 2/128 (even).
    assert sent([1 + 1 / 256, 1 + 3 / 256, 1 + 1.01 / 256, -(1 + 1 / 256)], "bf16") == [1, 1 + 2 / 128, 1 + 1 / 128, -1]


def test_bf16_travels_as_the_upper_half_of_float32():
    packet, _ = Dense(dtype="bf16").encode({"w": torch.tensor([1.0, -2.0])}, {}, RNG)
    assert packet.parts["w"].dtype == np.uint16
    assert packet.parts["w"].tolist() == [0x3F80, 0xC000]


def test_fp16_rounds_to_nearest_even():
    # 10 fraction bits, so the ties are at odd multiples of 2^-11.
    assert sent([1 + 2**-11, 1 + 3 * 2**-11], "fp16") == [1, 1 + 2**-9]


def test_fp16_refuses_what_rounds_to_infinity():
    below = float(np.nextafter(np.float32(65520), np.float32(0)))
    assert sent([below, -below], "fp16") == [65504, -65504]
    with refused(names=["'w'", "65520", "fp16", "bf16"]):
        sent([0.0, -65520.0], "fp16")


def test_bf16_refuses_what_rounds_to_infinity():
    largest = (2 - 2**-7) * 2.0**127
    assert sent([largest], "bf16") == [largest]
    with refused(names=["'w'", "3.40282e+38", "bf16", "fp32"]):
        sent([float(np.finfo(np.float32).max)], "bf16")


def test_a_float64_beyond_float32_is_refused():
    with refused(names=["'w'", "NaN", "infinity", "float32", "lower"], error=ValueError):
        Dense().encode({"w": torch.tensor([1e300], dtype=torch.float64)}, {}, RNG)


def test_16_bit_input_is_sent_exactly():
    x = torch.tensor([1 / 3, -7.0], dtype=torch.bfloat16)
    packet, _ = Dense().encode({"w": x}, {}, RNG)
    assert torch.equal(packet.decode()["w"], x.float())


def test_unknown_type_is_one_sentence():
    from_file: dict[str, Any] = {"dtype": "fp8"}
    with refused(names=["dtype='fp8'", "fp32", "fp16", "bf16"]):
        Dense(**from_file)


def test_add_to_a_float64_total():
    packet, _ = Dense(dtype="bf16").encode({"w": torch.tensor([1.0, 2.0])}, {}, RNG)
    total = {"w": torch.tensor([0.5, 0.5], dtype=torch.float64)}
    packet.add_to(total, 0.25)
    assert total["w"].tolist() == [0.75, 1.0]


def two_trees() -> Difference:
    """Two trees with more than a block, less than one, a scalar, and equal entries."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (3, BLOCK - 7), "b": (5,), "s": ()}
    a = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    b = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    a["w"][1, :100] = b["w"][1, :100]
    return Difference(a, b)


def as_bytes(x: Tree) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in x.items()}


def lazy(x: Difference) -> DenseDifference:
    packet, _ = Dense().encode_difference(x, {}, RNG)
    assert isinstance(packet, DenseDifference)
    return packet


@pytest.mark.parametrize("weight", [1.0, -1.0, 0.1, 37.0])
def test_a_difference_is_added_as_its_written_packet_is(weight: float):
    x = two_trees()
    packet, written = lazy(x), Dense().encode(x.tree(), {}, RNG)[0]
    begun, expected = packet.times(weight), written.times(weight)
    assert as_bytes(begun) == as_bytes(expected)
    packet.add_to(begun, 0.3 * weight)
    written.add_to(expected, 0.3 * weight)
    assert as_bytes(begun) == as_bytes(expected)
    # Nothing was written for it.
    assert "parts" not in vars(packet)


def test_a_difference_has_the_buffers_and_bits_of_its_written_packet():
    x = two_trees()
    packet, written = lazy(x), Dense().encode(x.tree(), {}, RNG)[0]
    assert packet.num_bits == written.num_bits
    assert as_bytes(packet.decode()) == as_bytes(written.decode())
    assert {name: part.tobytes() for name, part in packet.parts.items()} == {
        name: part.tobytes() for name, part in written.parts.items()
    }
    copy = pickle.loads(pickle.dumps(lazy(x)))  # noqa: S301 - our own bytes
    assert type(copy) is Packet and type(lazy(x).written()) is Packet
    assert as_bytes(copy.decode()) == as_bytes(written.decode())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["w", "b", "s"])
def test_a_difference_that_is_not_finite_is_refused_where_it_is_read(bad: float, name: str):
    x = two_trees()
    x.b[name].view(-1)[-1] = bad
    for read in (lambda p: p.times(2.0), lambda p: p.add_to(two_trees().a, 2.0), lambda p: p.parts, pickle.dumps):
        with refused(names=[name, "NaN", "infinity"], error=ValueError):
            read(lazy(x))


def test_large_finite_numbers_are_not_taken_for_infinity():
    # Their sum overflows.
    x = {"w": torch.full((4,), 3e38)}
    packet, _ = Dense().encode(x, {}, RNG)
    assert packet.decode()["w"].tolist() == x["w"].tolist()
    difference = lazy(Difference(x, {"w": torch.zeros(4)}))
    assert difference.times(1.0)["w"].tolist() == x["w"].tolist()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_difference_is_written_at_once_where_it_is_rounded(dtype: ValueType):
    x = two_trees()
    packet, _ = Dense(dtype=dtype).encode_difference(x, {}, RNG)
    assert as_bytes(packet.decode()) == as_bytes(Dense(dtype=dtype).encode(x.tree(), {}, RNG)[0].decode())


def test_a_difference_of_float64_is_written_at_once():
    x = Difference({"w": torch.tensor([1.0 + 2**-40], dtype=torch.float64)}, {"w": torch.ones(1, dtype=torch.float64)})
    packet, _ = Dense().encode_difference(x, {}, RNG)
    # In float32 both are 1.
    assert packet.decode()["w"].tolist() == [2**-40]


def on_both(make: Callable[[Tree, Tree], Packet]) -> tuple[Packet, Packet]:
    """The packet of two trees in main memory and on the pretended GPU."""
    x = two_trees()
    return make(x.a, x.b), make(*({name: on_gpu(tensor) for name, tensor in one.items()} for one in (x.a, x.b)))


@pytest.mark.parametrize(
    "make",
    [lambda a, b: lazy(Difference(a, b)), lambda a, b: Dense().encode(a, {}, RNG)[0]],
    ids=["difference", "tree"],
)
def test_a_packet_of_trees_on_a_gpu_is_added_there(make: Callable[[Tree, Tree], Packet]):
    with PretendedGpu() as gpu:
        here, there = on_both(make)
        sums, sums_there = here.times(0.3), there.times(0.3)
        here.add_to(sums, 37.0)
        there.add_to(sums_there, 37.0)
        seen = there.decode_beside(sums_there)
        assert {tensor.device.type for tensor in [*sums_there.values(), *seen.values()]} == {"cuda"}
        # A number that says whether all are finite, and no tensor.
        assert sum(gpu.downloads) <= 8 and there.num_bits == here.num_bits
        assert as_bytes({name: tensor.cpu() for name, tensor in sums_there.items()}) == as_bytes(sums)
        assert as_bytes({name: tensor.cpu() for name, tensor in seen.items()}) == as_bytes(here.decode())
        # Into a sum in main memory its buffers are added, which then are there.
        there.add_to(sums, -1.0)
        del gpu.downloads[:]
        there.add_to(sums_there, -1.0)
        assert gpu.downloads == []
        assert as_bytes({name: tensor.cpu() for name, tensor in sums_there.items()}) == as_bytes(sums)
        assert as_bytes(there.written().decode()) == as_bytes(here.decode())
        assert {name: part.tobytes() for name, part in there.parts.items()} == {
            name: part.tobytes() for name, part in here.parts.items()
        }


def test_what_is_not_finite_on_a_gpu_is_refused():
    with PretendedGpu():
        bad = {"w": on_gpu(torch.ones(3)), "b": on_gpu(torch.tensor([1.0, torch.inf]))}
        with refused(names=["'b'", "NaN", "infinity", "float32", "lower"], error=ValueError):
            Dense().encode(bad, {}, RNG)
        with refused(names=["'b'", "NaN", "infinity", "float32", "lower"], error=ValueError):
            lazy(Difference(bad, tree.zeros_like(bad))).times(1.0)
        large = {"w": on_gpu(torch.full((4,), 3e38))}
        assert Dense().encode(large, {}, RNG)[0].decode()["w"].tolist() == [torch.tensor(3e38)] * 4
