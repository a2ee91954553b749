"""Your own transformer and text: sequences that repeat a pattern of their owner, and a small causal transformer."""

import math
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rayfl.data.datasets import Dataset, Samples, Source


class Patterns(Source):
    """Each owner repeats a pattern of tokens of its own, from a random place on; the target is the next token."""

    name: ClassVar[str] = "patterns"
    owners: int = Field(default=4, ge=1, description="number of owners")
    length: int = Field(default=12, ge=2, description="tokens of a sequence")
    tokens: int = Field(default=8, ge=2, description="number of tokens")

    def load(self) -> Dataset:
        """24 sequences of each owner to train on, and 12 to test on."""
        draws = np.random.default_rng(3)
        patterns = [draws.integers(0, self.tokens, 5) for _ in range(self.owners)]
        train, test = (self.samples(draws, patterns, count) for count in (24, 12))
        return Dataset("patterns", train, test, num_classes=self.tokens, kind="text", vocabulary=self.tokens)

    def samples(self, draws: np.random.Generator, patterns: list[np.ndarray], count: int) -> Samples:
        """`count` sequences of each owner."""
        owners = np.repeat(np.arange(self.owners), count)
        places = draws.integers(0, 5, len(owners))[:, None] + np.arange(self.length + 1)
        tokens = np.stack([patterns[owner][row % 5] for owner, row in zip(owners, places, strict=True)])
        return Samples(tokens[:, :-1], tokens[:, 1:], owners)


class Attention(nn.Module):
    """Causal attention with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width], the shape stays."""
        scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(x.shape[2])
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1) > 0
        return self.out(scores.masked_fill(later, -1e9).softmax(dim=2) @ self.value(x))


class Transformer(nn.Module):
    """Embeddings of tokens and places, `depth` layers of attention, and a head."""

    def __init__(self, input_shape: tuple[int], num_classes: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_classes, width), nn.Embedding(input_shape[0], width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens [batch, length] -> logits [batch, length, num_classes]."""
        x = self.tokens(inputs.long()) + self.places.weight
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)
