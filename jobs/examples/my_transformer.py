"""Text of your own, and a transformers model for it: GPT-2's architecture, with weights from a seed."""

import numpy as np
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from rayfl.data.datasets import Dataset, Examples, Field, Source


class Patterns(Source):
    """Each owner repeats its own pattern of tokens, from a random position; the target is the next token."""

    name = "patterns"
    owners: int = Field(default=4, ge=1, description="number of owners")
    length: int = Field(default=12, ge=2, description="tokens of a sequence")
    tokens: int = Field(default=8, ge=2, description="number of tokens")

    def load(self) -> Dataset:
        """24 sequences of each owner to train on, and 12 to test on."""
        draws = np.random.default_rng(3)
        patterns = [draws.integers(0, self.tokens, 5) for _ in range(self.owners)]
        train, test = (self.examples(draws, patterns, count) for count in (24, 12))
        return Dataset("patterns", train, test, num_classes=self.tokens, kind="text", vocabulary=self.tokens)

    def examples(self, draws: np.random.Generator, patterns: list[np.ndarray], count: int) -> Examples:
        """`count` sequences of each owner."""
        owners = np.repeat(np.arange(self.owners), count)
        places = draws.integers(0, 5, len(owners))[:, None] + np.arange(self.length + 1)
        tokens = np.stack([patterns[owner][row % 5] for owner, row in zip(owners, places, strict=True)])
        return Examples(tokens[:, :-1], tokens[:, 1:], owners)


class GPT2(nn.Module):
    """Returns the logits of a causal language model. Without dropout, so that clients can be stacked."""

    def __init__(self, input_shape: tuple[int], num_classes: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=num_classes,
            n_positions=input_shape[0],
            n_embd=width,
            n_layer=depth,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens [batch, length] -> logits [batch, length, num_classes]."""
        return self.model(input_ids=inputs, use_cache=False).logits
