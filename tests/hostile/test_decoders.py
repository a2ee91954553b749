"""Packets of every codec for tests of files, and random bytes in place of gamma codes."""

import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfl.compress import packed_bits
from rayfl.compress.base import Packet
from rayfl.compress.masks import mask_packet
from rayfl.compress.scalar import count_packet, scalar_packet
from rayfl.compress.sign import votes_packet
from rayfl.compress.sparse import sparse_packet, top_k_support
from tests.contracts.every_compressor import VARIANTS, encode, label

FEW, MANY = 20, 3_000
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


BUFFERS = st.binary(max_size=60).map(lambda content: np.frombuffer(content, np.uint8))


@EXAMPLES
def test_gamma_codes_give_numbers_or_are_refused(examples: int):
    def check(data: st.DataObject) -> None:
        try:
            numbers = packed_bits.decode_gamma(data.draw(BUFFERS), data.draw(BUFFERS))
        except ValueError as error:
            assert "damaged" in str(error), error
        else:
            assert (numbers >= 1).all()

    fuzz(check, examples)
