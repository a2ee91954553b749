"""The narrow networks of every shipped model, against those written by hand."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.choices.kinds import named
from rayfl.compress.slices import cut
from rayfl.models.base import Architecture
from rayfl.models.widths.narrow import Narrowed, widths_of
from rayfl.models.widths.slices import Widths
from rayfl.network import named_weights
from tests.models.examples import EXAMPLES, WITH_BUFFERS, batch_of
from tests.models.widths.by_hand import BY_HAND, ByHand, Table, sliced

GROUPS = {"vgg11": 32, "resnet18": 32, "resnet20": 8}
"""Groups of the group norms: a multiple of them is kept."""


def test_every_model_is_written_by_hand():
    assert {*named(Architecture)} == {*BY_HAND}


def kept(hand: ByHand, groups: int, ratio: float, offset: int) -> dict[str, np.ndarray]:
    """Windows of ceil(ratio n) units of each list, raised to a multiple of `groups`, which begin at `offset`."""
    sizes = {name: groups * math.ceil(math.ceil(ratio * width - 1e-9) / groups) for name, width in hand.widths.items()}
    return {name: (offset + np.arange(size)) % hand.widths[name] for name, size in sizes.items()}


def units_of(widths: Widths, table: Table, lists: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The kept units of each group that was found, named by the first axis that has it."""
    found = []
    for group in widths.groups:
        name, _, axis = group.name.rpartition(" axis ")
        parts = [part for part, _ in table[name][int(axis)]]
        # Of an axis with several lists, a new one is at the end.
        found.append(lists[parts[-1]])
    return found


def drawn(name: str, tensor: Tensor) -> Tensor:
    """Random numbers that let outputs neither vanish nor grow through the layers."""
    if not tensor.is_floating_point():
        return tensor
    values = torch.randn(tensor.shape)
    return values.abs() if "running_var" in name else values / tensor.shape[1:].numel() ** 0.5


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("ratio", [0.5, 0.3])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_narrow_network_computes_what_one_written_by_hand_does(name: str, ratio: float, offset: int):
    architecture, shape, num_classes = {**EXAMPLES, **WITH_BUFFERS}[name]
    build = architecture.builder(shape, num_classes)
    torch.manual_seed(0)
    hand = BY_HAND[name]()
    lists = kept(hand, GROUPS.get(name, 1), ratio, offset)
    weights = {key: drawn(key, tensor) for key, tensor in named_weights(build()).items()}
    wanted = sliced(weights, hand, lists)
    by_hand = hand.build({key: len(units) for key, units in lists.items()}).eval()
    by_hand.load_state_dict(wanted)

    widths = widths_of(build, shape)
    index = widths.index(units_of(widths, hand.table, lists))
    found = {**weights, **cut(weights, index)}
    assert {key for key in wanted if not torch.equal(wanted[key], found[key])} == set()
    narrow = Narrowed(build, widths, widths.sizes(ratio))().eval()
    narrow.load_state_dict(found)
    inputs = batch_of(name, 3).inputs if name in EXAMPLES else torch.randn(3, *shape)
    with torch.no_grad():
        torch.testing.assert_close(narrow(inputs), by_hand(inputs), rtol=1e-6, atol=1e-6)
