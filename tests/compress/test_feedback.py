"""Error feedback: nothing is lost, it only comes later."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.base import Compressor, Packet
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.tree import Tree
from tests.refusals import refused

RNG = np.random.default_rng(0)


def from_table(inner: dict[str, Any]) -> ErrorFeedback:
    """As from an experiment file."""
    table: dict[str, Any] = {"inner": inner}
    return ErrorFeedback(**table)


def test_what_is_dropped_comes_later():
    # x = (4, 3) three times, one entry a time: p = (4, 3), (4, 6), (8, 3).
    compressor = ErrorFeedback(inner=TopK(keep_ratio=0.5))
    x = {"w": torch.tensor([4.0, 3.0])}
    memory, sent, kept = compressor.init(x), [], []
    for _ in range(3):
        packet, memory = compressor.encode(x, memory, RNG)
        sent.append(packet.decode()["w"].tolist())
        kept.append(memory["w"].tolist())
    assert sent == [[4.0, 0.0], [0.0, 6.0], [8.0, 0.0]]
    assert kept == [[0.0, 3.0], [4.0, 0.0], [0.0, 3.0]]


@pytest.mark.parametrize("inner", [TopK(keep_ratio=0.1), TopK(keep_ratio=0.1, scope="model"), Dense()])
def test_sent_plus_kept_is_the_input_to_the_bit(inner: Compressor):
    # Each entry is either sent or kept, so no addition rounds.
    compressor = ErrorFeedback(inner=inner)
    x = {"w": torch.from_numpy(RNG.standard_normal((20, 30)).astype(np.float32)), "b": torch.ones(3)}
    packet, memory = compressor.encode(x, compressor.init(x), RNG)
    decoded = packet.decode()
    assert all(torch.equal(decoded[name] + memory[name], tensor) for name, tensor in x.items())


def test_rounding_errors_are_fed_back():
    # fp16 has 10 fraction bits: 1 + 2^-11 is sent as 1; with the rest, 1 + 2^-10 is sent as it is.
    compressor = ErrorFeedback(inner=Dense(dtype="fp16"))
    x = {"w": torch.tensor([1 + 2**-11])}
    first, memory = compressor.encode(x, compressor.init(x), RNG)
    assert (first.decode()["w"].item(), memory["w"].item()) == (1.0, 2**-11)
    second, memory = compressor.encode(x, memory, RNG)
    assert (second.decode()["w"].item(), memory["w"].item()) == (1 + 2**-10, 0.0)


def test_bits_are_those_of_the_inner_compressor():
    x = {"w": torch.arange(1000.0)}
    inner = TopK(keep_ratio=0.01)
    compressor = ErrorFeedback(inner=inner)
    assert compressor.encode(x, compressor.init(x), RNG)[0].num_bits == inner.encode(x, {}, RNG)[0].num_bits < 32 * 1000


def test_memory_is_float32_even_for_float64():
    compressor = ErrorFeedback()
    x = {"w": torch.ones(20, dtype=torch.float64)}
    _, memory = compressor.encode(x, compressor.init(x), RNG)
    assert memory["w"].dtype == torch.float32


def test_feedback_around_feedback_is_refused():
    with refused(names=["feedback", "twice"]):
        ErrorFeedback(inner=ErrorFeedback()).init({"w": torch.ones(2)})
    clients = {"count": 4}
    plain: dict[str, Any] = {"rounds": 1, "data": "digits", "partition": "iid", "clients": clients, "model": "logistic"}
    plain["method"] = {"name": "fedavg", "lr": 0.1}
    for direction in ("uplink", "downlink"):
        table: dict[str, Any] = {direction: {"name": "feedback", "inner": {"name": "feedback"}}}
        with refused(names=["feedback", "twice"]):
            prepare(Experiment(**plain, **table))


def test_a_table_names_the_inner_compressor_and_is_written_back():
    compressor = from_table({"name": "topk", "keep_ratio": 0.25, "scope": "model"})
    assert compressor.inner == TopK(keep_ratio=0.25, scope="model")
    assert ErrorFeedback(**compressor.model_dump()) == compressor


def test_a_mistake_in_the_inner_table_is_one_sentence():
    with refused(names=["inner.keep_ratio=2.0", "(0, 1]"]):
        from_table({"name": "topk", "keep_ratio": 2.0})


class Remembering(Compressor):
    name = "remembering-of-this-test"

    def init(self, like: Tree) -> Tree:
        return dict(like)

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        return Dense().encode(x, memory, generator)


def test_a_compressor_that_remembers_tensors_by_their_names_is_refused():
    with refused(names=["remembering-of-this-test", "twice"]):
        ErrorFeedback(inner=Remembering()).init({"w": torch.ones(2)})
