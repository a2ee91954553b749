"""Models, methods and more that draw random numbers from the global generators of torch, numpy and `random`."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.compress.base import Packet
from rayfl.compress.sparse import TopK
from rayfl.methods.base import Method, Plan
from rayfl.methods.compressed.fedpse import FedPSE
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.methods.personal.ditto import Ditto
from rayfl.methods.server.fedavg import FedAvg
from rayfl.metrics.accuracy import Accuracy
from rayfl.schedules.asynchronous import Buffered
from rayfl.selections.base import Seen
from rayfl.selections.plain import Uniform
from rayfl.tree import State, Tree


class Drawing(nn.Module):
    """Two linear layers, between which `hide` draws in training."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(math.prod(input_shape), 12), nn.Linear(12, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.hide(torch.relu(self.body(inputs.flatten(1)))))

    def hide(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Functional(Drawing):
    def hide(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.5, training=self.training)


class Channels(Drawing):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.drop = nn.Dropout2d(0.5)

    def hide(self, hidden: Tensor) -> Tensor:
        return self.drop(hidden[:, :, None, None])[:, :, 0, 0]


class Slopes(Drawing):
    def hide(self, hidden: Tensor) -> Tensor:
        return F.rrelu(hidden - 0.1, 0.1, 0.9, training=self.training)


class Latent(Drawing):
    def hide(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden) if self.training else hidden


class Attention(Drawing):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.attention = nn.MultiheadAttention(12, 2, dropout=0.5, batch_first=True)

    def hide(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden[:, None], hidden[:, None], hidden[:, None], need_weights=False)[0][:, 0]


class Recurrent(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(1, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(6, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs.flatten(1)[..., None])[0][:, -1])


class Depth(Drawing):
    """Stochastic depth by Python's generator."""

    def hide(self, hidden: Tensor) -> Tensor:
        return hidden * 0 if self.training and random.random() < 0.5 else hidden


class NumpyNoise(Drawing):
    def hide(self, hidden: Tensor) -> Tensor:
        return hidden + torch.from_numpy(np.random.normal(size=hidden.shape)).float() if self.training else hidden


class Sampled(Drawing):
    """Draws in evaluation, too, as Monte Carlo dropout does."""

    def hide(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.5, training=True)


class OnlyEvaluation(Drawing):
    def hide(self, hidden: Tensor) -> Tensor:
        return hidden if self.training else F.dropout(hidden, 0.5, training=True)


class Constructed(Drawing):
    """A constructor that draws first weights by numpy, and an attribute that is in no state_dict by Python."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape, num_classes)
        self.kept = random.sample(range(12), 8)
        self.scale = nn.Buffer(torch.tensor(np.random.rand(12), dtype=torch.float32))

    def hide(self, hidden: Tensor) -> Tensor:
        kept = torch.zeros(12).index_fill(0, torch.tensor(self.kept), 1.0)
        return hidden * self.scale * kept


class LargeBatches(Drawing):
    """Draws only in batches of more than the two examples on which a model is tried before a run."""

    def hide(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.5, training=self.training) if len(hidden) > 2 else hidden


class Rare(Drawing):
    """Draws only where its input asks for it, in the middle of a run."""

    def hide(self, hidden: Tensor) -> Tensor:
        return hidden + np.random.rand() if self.training and hidden.detach().max() > 2.0 else hidden


MODELS: Sequence[type[nn.Module]] = (
    *(Functional, Channels, Slopes, Latent, Attention, Recurrent, Depth, NumpyNoise, Sampled, OnlyEvaluation),
    *(Constructed, LargeBatches, Rare),
)


def noise() -> float:
    """A small number of which each generator makes a part."""
    return 0.01 * (float(torch.rand(())) + np.random.rand() + random.random())


# Any: a state, a carry, or a part of it.
def shaken(value: Any) -> Any:
    """The value with noise on each tensor of numbers."""
    if isinstance(value, Mapping):
        return {name: shaken(part) for name, part in value.items()}
    return value + noise() if isinstance(value, Tensor) and value.is_floating_point() else value


# Any: arguments and results of any hook.
def _shaking(kind: type[Method], hook: str, shakes_argument: bool) -> type[Method]:
    """A method whose hook draws, on its first argument but one for `finish`, or on its result."""
    plain = getattr(kind, hook)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if shakes_argument:
            at = 1 if hook == "finish" else 0
            return plain(self, *given[:at], shaken(given[at]), *given[at + 1 :], **named)
        return shaken(plain(self, *given, **named))

    name = f"{kind.__name__}_{hook}"
    found = type(name, (kind,), {"__module__": __name__, "__qualname__": name, hook: call})
    return globals().setdefault(name, found)


class FedAvg_plan(FedAvg):
    """Draws the number of local steps."""

    def plan(self, round_number: int, coin: float) -> Plan:
        plan = super().plan(round_number, coin)
        steps = 1 + random.randrange(3)
        return replace(plan, stages=tuple(replace(one, epochs=None, steps=steps) for one in plan.stages))


METHODS: Sequence[tuple[type[Method], Mapping[str, Any]]] = (
    (FedAvg_plan, {}),
    *((_shaking(FedAvg, hook, False), {}) for hook in ("begin", "step", "end_stage", "init_server", "update")),
    (_shaking(FedAvg, "finish", True), {}),
    *((_shaking(Ditto, hook, False), {}) for hook in ("init_client", "eval_begin")),
    *((_shaking(FedPSE, hook, True), {"keep_ratio": 0.5}) for hook in ("personal_message", "reply")),
    (_shaking(FedPSE, "receive_reply", False), {"keep_ratio": 0.5}),
    (_shaking(DPSGD, "mix", False), {}),
)


class NoisyTopK(TopK):
    """A compressor that draws from a global generator instead of from the one it is given."""

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        return super().encode(shaken(x), memory, generator)


class Shuffling(Uniform):
    """A selection that does so."""

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        return random.sample(available.tolist(), num_wanted)


class NoisyAccuracy(Accuracy):
    """A metric that does so."""

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return super().each(outputs + torch.rand_like(outputs), targets)


class Jittered(Buffered):
    """A schedule that does so."""

    def scale(self, staleness: int) -> float | None:
        scale = super().scale(staleness)
        return None if scale is None else scale * (1 + noise())
