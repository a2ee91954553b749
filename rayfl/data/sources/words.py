"""Texts as tokens of words, by the same rules on every machine, for the classification of texts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field
from rayfl.data.sources.conversion import dataset
from rayfl.limits import memory

Vocabulary = Annotated[int, Field(ge=3, description="kinds of tokens, padding and unknown among them")]
Length = Annotated[int, Field(ge=1, description="tokens of a text")]
PAD, UNKNOWN = 0, 1
FIRST_WORD = 2


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits, with apostrophes inside; HTML's line breaks are left out."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower().replace("<br />", " "))


def numbered(texts: Sequence[Sequence[str]], vocabulary: int) -> dict[str, int]:
    """The token number of each of the `vocabulary - 2` most frequent words."""
    counts = Counter(chain.from_iterable(texts))
    order = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: token for token, word in enumerate(order[: vocabulary - FIRST_WORD], start=FIRST_WORD)}


def encoded(texts: Sequence[Sequence[str]], numbers: Mapping[str, int], length: int) -> np.ndarray:
    """The tokens of the texts, int64 [num_texts, length]."""
    tokens = np.full((len(texts), length), PAD, np.int64)
    for row, text in enumerate(texts):
        kept = [numbers.get(word, UNKNOWN) for word in text[:length]]
        tokens[row, : len(kept)] = kept
    return tokens


def text_dataset(
    name: str,
    place: str,
    train: Examples,
    test: Examples | None,
    test_share: float,
    vocabulary: int,
    length: int,
    classes: Sequence[str] = (),
    owner_names: Sequence[str] = (),
) -> Dataset:
    """The dataset of texts, object [n, 1], whose tokens int64 [n, length] are words, numbered by those of train.

    Arguments are those of `conversion.dataset`, `words.numbered` and `words.encoded`.
    """

    def tokens(train_texts: np.ndarray, test_texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        num_texts = len(train_texts) + len(test_texts)
        memory.require(8 * length * num_texts, f"data.length={length} for {num_texts} texts", "lower it")
        of_train, of_test = ([words(text) for text in texts[:, 0]] for texts in (train_texts, test_texts))
        numbers = numbered(of_train, vocabulary)
        return encoded(of_train, numbers, length), encoded(of_test, numbers, length)

    texts = dataset(
        name, place, train, test, test_share, kind="text", classes=classes, fit=tokens, owner_names=owner_names
    )
    return replace(texts, vocabulary=vocabulary)
