"""Random and mutated packets: every codec refuses with ValueError what it does not read, and makes no room for lies."""

import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfl.compress import bits
from rayfl.compress.base import Packet
from rayfl.compress.golomb import decode_golomb
from rayfl.compress.mask import mask_packet
from rayfl.compress.positions import decode_counted, decode_mask, decode_positions
from rayfl.compress.scalar import count_packet, scalar_packet
from rayfl.compress.sparse import sparse_packet, top_k_support
from rayfl.compress.votes import votes_packet
from tests.contracts.every_compressor import VARIANTS, encode, label

FEW, MANY = 60, 3_000
LONG = [pytest.mark.hostile, pytest.mark.timeout(1800)]
EXAMPLES = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=LONG)])
MOST_BYTES = 256 << 20
"""Memory beyond what was there before that a decoder may take, whatever the packet says."""

X = {
    "w": torch.from_numpy(np.random.default_rng(0).standard_normal((20, 9)).astype(np.float32)),
    "b": torch.tensor([0.0, -1.0, 2.0]),
    "s": torch.tensor(3.0),
    "none": torch.zeros(0),
}
SIGNS = {name: tensor > 0 for name, tensor in X.items()}


PACKETS: dict[str, Packet] = {
    **{label(compressor): encode(compressor, X)[0] for compressor in VARIANTS},
    "mask": mask_packet(SIGNS),
    "votes": votes_packet(X),
    "votes with ties": votes_packet(X, ties=True),
    "count": count_packet("n", 5),
    "scalar": scalar_packet("lr", 0.5),
    "a support": sparse_packet(X, top_k_support(X, 0.2)),
}
DTYPES = ["u1", "i1", "u2", "i4", "u8", "i8", "f2", "f4", "f8", "?"]


def fuzz(check: Callable[[st.DataObject], None], examples: int) -> None:
    """Run `check` on drawn data, always the same."""
    given(st.data())(
        settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        )(check)
    )()


@st.composite
def arrays(draw: st.DrawFn, most: int = 300) -> np.ndarray:
    """A buffer of any bytes and of any type."""
    content, kind = draw(st.binary(max_size=most)), np.dtype(draw(st.sampled_from(DTYPES)))
    whole = content[: len(content) // kind.itemsize * kind.itemsize]
    return np.frombuffer(whole, np.uint8 if kind.kind == "b" else kind).astype(kind, copy=False)


@st.composite
def mutated(draw: st.DrawFn, buffer: np.ndarray) -> np.ndarray | None:
    """The buffer with other bytes, another length, another type or shape; None: without it."""
    how = draw(st.sampled_from(["gone", "random", "cut", "longer", "bytes", "bytes", "ones", "type", "shape"]))
    if how == "gone":
        return None
    if how == "random":
        return draw(arrays())
    if how == "cut":
        return buffer[: draw(st.integers(0, buffer.size))]
    if how == "longer":
        return np.concatenate([buffer, np.resize(buffer, draw(st.integers(1, 9))).astype(buffer.dtype)])
    if how == "type":
        return buffer.astype(draw(st.sampled_from(DTYPES)))
    if how == "shape":
        return buffer.reshape(1, -1)
    changed = np.frombuffer(bytearray(buffer.tobytes()), np.uint8)
    if how == "ones":
        changed[:] = 255
    elif changed.size:
        for _ in range(draw(st.integers(1, 4))):
            changed[draw(st.integers(0, changed.size - 1))] = draw(st.integers(0, 255))
    return changed.view(buffer.dtype)


def read_in_every_way(packet: Packet) -> None:
    """Decode, support, sum, pieces and count: each gives what has the known shapes, or ValueError."""
    shapes = {name: torch.Size(shape) for name, shape in packet.codec.shapes}  # type: ignore[attr-defined]

    def decode() -> None:
        assert {name: tensor.shape for name, tensor in packet.decode().items()} == shapes

    def support() -> None:
        assert {name: tensor.shape for name, tensor in packet.support().items()} == shapes

    def add() -> None:
        packet.add_to({name: torch.zeros(shape) for name, shape in shapes.items()}, 0.5)

    def pieces() -> None:
        if hasattr(packet.codec, "pieces"):
            for piece in packet.pieces():
                piece.decode()

    def count() -> None:
        assert packet.num_values >= 0

    for read in (decode, support, add, pieces, count):
        try:
            read()
        except ValueError as error:
            assert "damaged" in str(error), error


@pytest.fixture(autouse=True)
def no_room_for_lies() -> Iterator[None]:
    """The most memory that this process has had grows by little."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


@EXAMPLES
def test_a_mutated_packet_is_read_or_refused(examples: int):
    def check(data: st.DataObject) -> None:
        packet = PACKETS[data.draw(st.sampled_from(sorted(PACKETS)))]
        parts = dict(packet.parts)
        for key in data.draw(st.lists(st.sampled_from([*parts, "more"]), min_size=1, max_size=3, unique=True)):
            changed = data.draw(mutated(parts.get(key, np.zeros(3, np.uint8))))
            parts = {name: part for name, part in parts.items() if name != key}
            if changed is not None:
                parts[key] = changed
        read_in_every_way(Packet(parts, packet.codec))

    fuzz(check, examples)


@EXAMPLES
def test_random_bytes_are_refused_or_have_the_known_shapes(examples: int):
    def check(data: st.DataObject) -> None:
        packet = PACKETS[data.draw(st.sampled_from(sorted(PACKETS)))]
        random = {
            key: np.frombuffer(data.draw(st.binary(min_size=part.nbytes, max_size=part.nbytes)), part.dtype)
            for key, part in packet.parts.items()
        }
        read_in_every_way(Packet(random, packet.codec))

    fuzz(check, examples)


BUFFERS = st.binary(max_size=60).map(lambda content: np.frombuffer(content, np.uint8))
SIZES = st.one_of(st.integers(0, 70), st.integers(0, 2**31))


def increasing(positions: np.ndarray, size: int, count: int | None = None) -> None:
    assert positions.dtype == np.int64 and (count is None or positions.size == count)
    assert not positions.size or (positions[0] >= 0 and positions[-1] < size and (np.diff(positions) > 0).all())


@EXAMPLES
def test_codes_of_positions_give_positions_or_are_refused(examples: int):
    def check(data: st.DataObject) -> None:
        buffer, size, few = data.draw(BUFFERS), data.draw(SIZES), data.draw(st.integers(0, 70))
        if data.draw(st.booleans()) and buffer.size:
            buffer = np.append(buffer[:-1], np.uint8(data.draw(st.integers(0, 6))))
        # Every position of a tensor is a buffer of the tensor's size, which both ends know.
        count = min(few, size)
        for decode in (
            lambda: increasing(decode_positions(buffer, size, count), size, count),
            lambda: increasing(decode_counted(buffer, min(size, 10_000)), min(size, 10_000)),
            lambda: increasing(decode_golomb(buffer, size, count, data.draw(st.integers(0, 31))), size, count),
            lambda: increasing(np.flatnonzero(decode_mask(buffer, min(size, 10_000), count)), size, count),
        ):
            try:
                decode()
            except ValueError as error:
                assert "damaged" in str(error), error

    fuzz(check, examples)


@EXAMPLES
def test_gamma_codes_give_numbers_or_are_refused(examples: int):
    def check(data: st.DataObject) -> None:
        try:
            numbers = bits.decode_gamma(data.draw(BUFFERS), data.draw(BUFFERS))
        except ValueError as error:
            assert "damaged" in str(error), error
        else:
            assert (numbers >= 1).all()

    fuzz(check, examples)
