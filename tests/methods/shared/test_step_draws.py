"""Draws inside a step: uniform, independent over entries, steps and clients, and the same under vmap."""

import numpy as np
import torch

from rayfl.methods.shared.step_draws import first_key, next_key, uniforms

LIKE = {"a": torch.zeros(100, 100), "b": torch.zeros(3000)}


def keys(count: int) -> list[torch.Tensor]:
    made = [first_key(np.random.default_rng(5))]
    while len(made) < count:
        made.append(next_key(made[-1]))
    return made


def test_splitmix64_is_that_of_the_paper():
    # Its first outputs for the seed 0, computed with Python's integers.
    def output(state: int) -> int:
        mask = (1 << 64) - 1
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert output(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    start = output(7)
    drawn = uniforms(torch.tensor(7), {"x": torch.zeros(2, 3)})["x"].flatten()
    expected = [output((start + k * 0x9E3779B97F4A7C15) % (1 << 64)) >> 40 for k in range(1, 7)]
    assert drawn.tolist() == [value / (1 << 24) for value in expected]
    assert int(next_key(torch.tensor(7))) % (1 << 64) == output(7 + 0x9E3779B97F4A7C15)


def test_draws_are_uniform_and_independent():
    rows = torch.stack([torch.cat([t.flatten() for t in uniforms(key, LIKE).values()]) for key in keys(20)]).double()
    assert float(rows.min()) >= 0 and float(rows.max()) < 1
    # Of n draws the mean deviates by 1 / sqrt(12 n) and the mean square by sqrt(4 / 45 n).
    n = rows.numel()
    assert abs(float(rows.mean()) - 1 / 2) < 4.5 / np.sqrt(12 * n)
    assert abs(float(rows.square().mean()) - 1 / 3) < 4.5 * np.sqrt(4 / (45 * n))
    centred = (rows - 1 / 2) * np.sqrt(12)
    for product in (centred[:-1] * centred[1:], centred[:, :-1] * centred[:, 1:]):
        assert abs(float(product.mean())) < 4.5 / np.sqrt(product.numel())
    counts = torch.histc(rows.flatten(), bins=64, min=0, max=1)
    assert float(((counts - n / 64).square() / (n / 64)).sum()) < 63 + 4.5 * np.sqrt(2 * 63)


def test_a_stack_draws_what_each_client_draws_alone():
    alone = [uniforms(key, LIKE)["b"] for key in keys(3)]
    stacked = torch.vmap(lambda key: uniforms(key, LIKE)["b"])(torch.stack(keys(3)))
    assert torch.equal(stacked, torch.stack(alone))
