"""Count sketches against their definition: exact sums, linear, unbiased estimates of the stated variance."""

import numpy as np
import pytest
import torch

from rayfl.compress.countsketch import CountSketch, Sketching, hashes, largest
from rayfl.compress.sparse import TopK
from rayfl.tree import Tree
from tests.contracts.every_compressor import normal
from tests.refusals import refused


def tensors(seed: int) -> Tree:
    """20 numbers in three tensors."""
    return {"a": normal(seed, 3, 4), "b": normal(seed + 1, 7), "c": normal(seed + 2)}


def flat(x: Tree) -> np.ndarray:
    return np.concatenate([tensor.numpy().reshape(-1) for tensor in x.values()])


def matrices(num_rows: int, num_columns: int, num_entries: int, seed: int) -> np.ndarray:
    """The sketch as matrices, float64 [R, C, d]: s_r(j) where j falls into the cell, else 0."""
    found = np.zeros((num_rows, num_columns, num_entries))
    for row, (cells, signs) in enumerate(hashes(num_rows, num_columns, num_entries, seed)):
        found[row, cells, np.arange(num_entries)] = signs
    return found


def estimates(table: np.ndarray, num_entries: int, seed: int) -> np.ndarray:
    return largest(table, num_entries, 1.0, seed).numpy()


@pytest.mark.parametrize(("rows", "columns"), [(1, 6), (3, 4), (5, 2)])
def test_tables_and_estimates_are_those_of_the_definition(rows: int, columns: int):
    x, a = tensors(0), matrices(rows, columns, 20, seed=9)
    # Every entry is in one cell of each row, with a sign.
    assert (np.abs(a).sum(axis=1) == 1).all() and set(np.unique(a)) == {-1.0, 0.0, 1.0}
    sketching = Sketching(rows=rows, columns=columns)  # pyright: ignore[reportArgumentType]
    table = sketching.table(x, 9)
    np.testing.assert_allclose(table, a @ flat(x), rtol=1e-6, atol=1e-6)
    wanted = np.median(np.einsum("rcj,rc->rj", a, table.numpy()), axis=0)
    np.testing.assert_array_equal(estimates(table.numpy(), 20, 9), wanted)


def test_tables_are_linear():
    sketching, x, y = Sketching(rows=3, columns=5), tensors(0), tensors(10)
    both = {name: x[name] - 2.5 * y[name] for name in x}
    wanted = sketching.table(x, 4) - 2.5 * sketching.table(y, 4)
    np.testing.assert_allclose(sketching.table(both, 4), wanted, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 5])
def test_estimates_are_unbiased_and_one_row_has_the_stated_variance(rows: int):
    x, columns, seeds = flat(tensors(0)).astype(np.float64), 8, 2000
    sketching = Sketching(rows=rows, columns=columns)  # pyright: ignore[reportArgumentType]
    tables = (sketching.table(tensors(0), seed).numpy() for seed in range(seeds))
    errors = np.stack([estimates(table, 20, seed) for seed, table in enumerate(tables)]) - x
    assert np.abs(errors.mean(axis=0) / (errors.std(axis=0) / np.sqrt(seeds))).max() < 4.5
    if rows == 1:
        squares = errors**2
        z = (squares.mean(axis=0) - ((x**2).sum() - x**2) / columns) / (squares.std(axis=0) / np.sqrt(seeds))
        assert np.abs(z).max() < 4.5


def test_without_collisions_the_largest_entries_arrive_exactly():
    x, generator = tensors(0), np.random.default_rng(0)
    packet, memory = CountSketch(columns=100_003, keep_ratio=0.3).encode(x, {}, generator)
    seed = int(packet.parts["seed"][0])
    assert memory == {} and all(len(set(cells)) == 20 for cells, _ in hashes(5, 100_003, 20, seed))
    wanted = TopK(keep_ratio=0.3, scope="model").encode(x, {}, generator)[0].decode()
    assert packet.num_values == 6
    assert all(torch.equal(packet.decode()[name], wanted[name]) for name in x)


def test_the_wire_has_a_fiftieth_of_the_entries_in_each_of_five_rows():
    x = {"w": normal(0, 30, 10), "b": normal(1, 1)}
    packet, _ = CountSketch().encode(x, {}, np.random.default_rng(0))
    # ceil(301 / 50) = 7 cells in a row, of which ceil(301 / 100) = 4 entries are estimated.
    assert packet.num_bits == 32 * 5 * 7 + 64 and packet.num_values == 4
    assert CountSketch(rows=3, columns=11).encode(x, {}, np.random.default_rng(0))[0].num_bits == 32 * 3 * 11 + 64


def test_every_packet_draws_its_hashes_anew():
    x, generator = tensors(0), np.random.default_rng(0)
    first, second = (CountSketch(columns=4).encode(x, {}, generator)[0] for _ in range(2))
    assert first.parts["seed"][0] != second.parts["seed"][0]
    assert first.parts["table"].tolist() != second.parts["table"].tolist()


def test_sizes_that_are_none():
    with refused(names=["rows", "4", "1, 3, 5"]):
        CountSketch(rows=4)  # pyright: ignore[reportArgumentType]
    with refused(names=["columns", "0"]):
        CountSketch(columns=0)
    with refused(names=["keep_ratio", "0.0"]):
        CountSketch(keep_ratio=0.0)
    with refused(names=["table", "infinity"], error=ValueError):
        CountSketch(columns=1).encode({"w": torch.full((4,), 3e38)}, {}, np.random.default_rng(1))
