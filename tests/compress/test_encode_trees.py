"""What a compressor of a third party returns is checked before it is billed."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from rayfl.compress.base import Packet, Quantizer, Tree, encode_trees, shapes_of
from rayfl.compress.dense import DenseCodec

TREE: Tree = {"w": torch.ones(3)}
CODEC = DenseCodec(shapes_of(TREE), "fp32")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((Packet(cast(Any, {"w": [1.0, 1.0, 1.0]}), CODEC), {}), ["numpy arrays", "'w'", "list"]),
        (Packet({"w": np.ones(3, np.float32)}, CODEC), ["a packet and its next memory"]),
        ((Packet({"w": np.ones(3, np.float32)}, CODEC), None), ["a packet and its next memory"]),
    ],
)
def test_what_is_no_packet_names_the_compressor(returned: Any, words: list[str]):
    class Mine(Quantizer):
        def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
            return returned

    with pytest.raises(TypeError) as refused:
        encode_trees(Mine(), {"delta": TREE}, {}, np.random.default_rng(0))
    assert all(word in str(refused.value) for word in ("Mine.encode", *words))
