"""A checkpoint of GPT-2's family for the next token, and blocks of a text file as its examples."""

from pathlib import Path

import numpy as np
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rayfl.data.datasets import Dataset, Examples, Field, Source


class Lines(Source):
    """Blocks of tokens of a text file; consecutive blocks belong to one owner."""

    file: str = Field(description="a text file")
    folder: str = Field(description="the checkpoint's folder, with its tokenizer")
    length: int = Field(default=64, ge=2, description="tokens of a block")
    owners: int = Field(default=10, ge=1, description="number of owners")

    def load(self) -> Dataset:
        """Nine tenths of the blocks to train on, the others to test on."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        tokens = np.array(tokenizer(Path(self.file).read_text())["input_ids"])
        blocks = tokens[: (len(tokens) - 1) // self.length * self.length + 1]
        inputs, targets = (part.reshape(-1, self.length) for part in (blocks[:-1], blocks[1:]))
        owners = np.arange(len(inputs)) * self.owners // len(inputs)
        test = np.arange(len(inputs)) % 10 == 0
        train, held_out = (Examples(inputs[rows], targets[rows], owners[rows]) for rows in (~test, test))
        size = AutoConfig.from_pretrained(self.folder).vocab_size
        return Dataset("lines", train, held_out, num_classes=size, kind="text", vocabulary=size)


class CausalLM(nn.Module):
    """The network of a checkpoint, without dropout."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens [batch, length] to logits [batch, length, num_classes]."""
        return self.model(input_ids=inputs, use_cache=False).logits
