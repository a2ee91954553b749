"""Models of token sequences, int64 [batch, length], in which token 0 is padding."""

from typing import Literal

import torch
from torch import Tensor, nn

from rayfl.models.base import Architecture, Field, Width

PAD = 0


class CharLSTM(Architecture):
    """Predicts the token that follows: an embedding, LSTM layers, and a linear layer on the last state, or on all.

    The network of McMahan et al., AISTATS 2017, and Reddi et al., ICLR 2021, for Shakespeare: 822,570 parameters at 90
    tokens (PyTorch's LSTM has two biases a gate; 820,522 with one). A padding token is embedded as any other.
    """

    name = "char-lstm"
    vocabulary: Width | None = Field(default=None, description="tokens embedded; by default as many as classes")
    embedding: Width = Field(default=8, description="numbers a token")
    hidden: Width = Field(default=256, description="units of a layer")
    layers: Width = Field(default=2, le=100, description="LSTM layers")
    predicts: Literal["last", "all"] = Field(
        default="last", description="last: what follows the sequence; all: what follows each token, for next-token"
    )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_tokens(input_shape)
        kind = LastState if self.predicts == "last" else EveryState
        return kind(self.vocabulary or num_classes, self.embedding, self.hidden, self.layers, num_classes)


class EveryState(nn.Module):
    """Embedding, LSTM, and a linear layer on the last layer's states."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, length] to logits [batch, length, num_classes]."""
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states)


class LastState(EveryState):
    """The same with the linear layer on the state after the last token alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, length] to logits [batch, num_classes]."""
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states[:, -1])


class MeanEmbedding(Architecture):
    """A linear layer on the mean embedding of a text's tokens, for IMDB: 160,017 parameters at two classes.

    FedPSE names an embedding and one fully connected layer; vocabulary and widths are ours. Two classes
    take one output z, as a logistic regression has it: the logits are 0 and z, and the cross-entropy is that of
    sigmoid(z).
    """

    name = "mean-embedding"
    vocabulary: Width = Field(default=10_000, description="tokens embedded")
    embedding: Width = Field(default=16, description="numbers a token")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_tokens(input_shape)
        return Mean(self.vocabulary, self.embedding, num_classes)


class Mean(nn.Module):
    """Embedding, mean over the tokens without padding, linear layer; of padding alone the mean is 0."""

    def __init__(self, vocabulary: int, embedding: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.head = nn.Linear(embedding, 1 if num_classes == 2 else num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, length] to logits [batch, num_classes]."""
        vectors = self.embedding(tokens)
        kept = (tokens != PAD).to(vectors.dtype).unsqueeze(-1)
        logits = self.head((vectors * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1.0))
        return torch.cat([torch.zeros_like(logits), logits], dim=1) if logits.shape[1] == 1 else logits
