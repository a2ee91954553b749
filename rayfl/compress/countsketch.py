"""Count sketch: sums of entries under random hashes and signs, from which the largest entries are estimated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rayfl.compress.base import Buffers, Compressor, Field, Packet, Tree, entries, shapes_of
from rayfl.compress.codecs import PositionedCodec
from rayfl.compress.dense import Dense
from rayfl.compress.largest import top_k_mask
from rayfl.compress.sparse import SEED, KeepRatio, kept_entries, seed_of, sizes_of
from rayfl.settings import Settings
from rayfl.tree import num_entries


def hashes(num_rows: int, num_columns: int, num_entries: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, row by row, for every entry j its cell h_r(j), int64 [num_entries] in [0, num_columns), and its sign
    s_r(j), float32 [num_entries].

    All are independent and drawn from the seed, so they are not sent.
    """
    for row in range(num_rows):
        draws = np.random.Generator(np.random.PCG64([seed, row])).integers(0, 2 * num_columns, num_entries)
        yield draws >> 1, 1 - 2 * (draws & 1).astype(np.float32)


def largest(table: np.ndarray, num_entries: int, keep_ratio: float, seed: int) -> torch.Tensor:
    """The k largest estimates at their positions, and zeros elsewhere, float32 [num_entries]; from a `table`, float32
    [R, C], that was made with `seed`.

    The estimate of entry j is the median over the rows of s_r(j) T[r, h_r(j)].
    """
    rows = zip(table, hashes(len(table), table.shape[1], num_entries, seed), strict=True)
    estimates = torch.from_numpy(np.median([signs * row[cells] for row, (cells, signs) in rows], axis=0))
    return estimates * top_k_mask(estimates, kept_entries(num_entries, keep_ratio))


class Sketching(Settings):
    """The settings of a count sketch of a tree: its size, and the share of entries that are estimated from it."""

    rows: Literal[1, 3, 5, 7] = Field(default=5, description="rows of the table, R; an estimate is a median over rows")
    columns: int | None = Field(
        default=None, ge=1, description="cells of a row, C; default: a fiftieth of the entries, rounded up"
    )
    keep_ratio: KeepRatio = Field(default=0.01, description="share of the entries that is estimated, k / n, in (0, 1]")

    def table(self, x: Tree, seed: int) -> torch.Tensor:
        """T, float32 [R, C], on the CPU: T[r, c] = the sum of s_r(j) x_j over the tree's entries j with h_r(j) = c.

        Linear in x, except that each sum is rounded once. ValueError on NaN and infinity in x; a sum may be infinite.
        """
        flat = np.concatenate([entries(name, tensor).numpy() for name, tensor in x.items()])
        columns = self.columns or -(-flat.size // 50)
        row_hashes = hashes(self.rows, columns, flat.size, seed)
        return torch.from_numpy(
            np.stack([np.bincount(cells, signs * flat, columns) for cells, signs in row_hashes])
        ).float()


@dataclass(frozen=True)
class CountSketchCodec(PositionedCodec):
    """Reads "table", fp32 [R * C] row by row, and "seed", uint64 [1]; both are missing if there are no entries."""

    rows: int
    keep_ratio: float

    def read(self, parts: Buffers) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """The largest estimates that are not 0."""
        if parts:
            sizes = sizes_of(self.shapes)
            table = parts["table"].reshape(self.rows, -1)
            flat = largest(table, sum(sizes.values()), self.keep_ratio, seed_of(parts, SEED))
            for name, estimates in zip(sizes, flat.split([*sizes.values()]), strict=True):
                yield name, estimates.nonzero().view(-1), estimates[estimates != 0]


class CountSketch(Sketching, Compressor, on_device=True):
    """A table of R x C sums of the whole tree, from which the receiver estimates the k largest entries.

    Entry j is added to one cell in each row, with a random sign; its estimate is the median over the rows of that cell
    times the sign. Every estimate is unbiased, and that of one row has variance (||v||^2 - v_j^2) / C. The decoded tree
    is biased, because it has only the largest estimates, and it is not a contraction if many entries collide.
    Bits: 32 R C, and a seed of 64 bits, drawn for each packet. A method whose clients share a seed can add the tables
    (`fetchsgd`); as a compressor each packet is decoded by itself.
    Source: Charikar, Chen, Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002.
    """

    name = "countsketch"

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """The table and its seed. ValueError on NaN, infinity, and sums too large for float32."""
        codec = CountSketchCodec(shapes_of(x), self.rows, self.keep_ratio)
        if not num_entries(x):
            return Packet({}, codec), memory
        seed = generator.integers(0, 1 << 64, 1, dtype=np.uint64)
        table = Dense().encode({"table": self.table(x, int(seed[0]))}, {}, generator)[0].parts
        return Packet({**table, SEED: seed}, codec), memory
