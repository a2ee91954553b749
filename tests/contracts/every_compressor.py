"""The compressors under contract: found by importing rayfl/compress/, so a new one is tested by being there."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch

import rayfl.compress
from rayfl.compress.base import Compressor, Packet
from rayfl.compress.compose import Compose
from rayfl.compress.dense import Dense
from rayfl.compress.eden import Eden
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.lossless import Lossless
from rayfl.compress.natural import NaturalCompression
from rayfl.compress.powersgd import PowerSGD
from rayfl.compress.quantize import QSGD, Quantize, TernGrad
from rayfl.compress.random import Bernoulli, RandK
from rayfl.compress.sign import ScaledSign
from rayfl.compress.sparse import TopK
from rayfl.compress.structured import Structured
from rayfl.compress.ternary import Ternary
from rayfl.compress.threshold import Threshold
from rayfl.tree import Tree


def compressor_classes() -> list[type[Compressor]]:
    for module in pkgutil.iter_modules(rayfl.compress.__path__):
        importlib.import_module(f"rayfl.compress.{module.name}")
    pending, found = [Compressor], []
    while pending:
        for subclass in pending.pop().__subclasses__():
            pending.append(subclass)
            if subclass.__module__.startswith("rayfl.") and not inspect.isabstract(subclass):
                found.append(subclass)
    return sorted(set(found), key=lambda cls: cls.name)


def variants() -> Iterator[Compressor]:
    """Each class by default, with every choice of every Literal and bool field, and around each plain compressor."""
    wrapping = {cls for cls in compressor_classes() for field in cls.model_fields.values() if _is_compressor(field)}
    for cls in compressor_classes():
        yield cls()
        for name, field in cls.model_fields.items():
            # Any: whatever the field takes.
            choices: Iterable[Any] = ()
            if get_origin(field.annotation) is Literal:
                choices = get_args(field.annotation)
            elif field.annotation is bool:
                choices = (False, True)
            elif _is_compressor(field):
                # Any: the field's annotation is a class, as `_is_compressor` has seen.
                kind: Any = field.annotation
                fitting = (plain for plain in compressor_classes() if issubclass(plain, kind))
                choices = (plain() for plain in fitting if plain not in wrapping)
            yield from (cls(**{name: choice}) for choice in choices if choice != field.default)


def _is_compressor(field) -> bool:
    return inspect.isclass(field.annotation) and issubclass(field.annotation, Compressor)


def label(given: Compressor | str) -> str:
    """The id of a test's argument: a compressor and its settings."""
    return given if isinstance(given, str) else repr(given).replace(" ", "")


VARIANTS = [
    *variants(),
    # Buckets of a whole tensor and of a few entries, one level, and levels of more than 8 bits.
    QSGD(levels=1, bucket=0),
    QSGD(levels=200, coding="elias"),
    Quantize(norm="inf", levels=3, bucket=5),
    Quantize(norm="1", levels=1, bucket=5),
    Quantize(norm="2", levels=32767, bucket=0),
    TernGrad(clip=2.5),
    Ternary(keep_ratio=1.0),
    Ternary(keep_ratio=0.4, scope="model"),
    Structured(keep_ratio=0.3),
    Structured(threshold=0.8),
    # More than half of the entries, k that differ from tensor to tensor, both biased in 16 bits, and everything.
    RandK(keep_ratio=0.7, scope="model"),
    RandK(keep_ratio=0.3, scale=False, values="bf16"),
    RandK(keep_ratio=0.3, scale=False, scope="model"),
    RandK(keep_ratio=1.0),
    Bernoulli(probability=0.2),
    Threshold(threshold=0.7, relative=True),
    Threshold(threshold=0.3, relative=True, values="bf16"),
    # Two unbiased ones; contractions of all kinds, for every draw and in expectation.
    Compose(outer=RandK(), inner=NaturalCompression()),
    Compose(outer=RandK(scope="model", positions="coded"), inner=TernGrad()),
    Compose(outer=RandK(keep_ratio=0.4), inner=Quantize(norm="inf", levels=3, bucket=5)),
    Compose(outer=RandK(keep_ratio=0.4), inner=Dense()),
    Compose(outer=RandK(keep_ratio=0.5, scale=False), inner=ScaledSign()),
    Compose(outer=RandK(keep_ratio=0.5, scale=False), inner=NaturalCompression()),
    Compose(outer=TopK(keep_ratio=0.5, scope="model"), inner=TernGrad()),
    Compose(outer=Threshold(threshold=0.3, relative=True), inner=ScaledSign()),
    Compose(outer=Threshold(threshold=0.3, relative=True), inner=NaturalCompression()),
    ErrorFeedback(inner=Compose(outer=TopK(), inner=QSGD())),
    # Several bits, one rotation, and a memory under feedback and around it.
    Eden(bits=3, scale="least", rotations=1),
    Eden(bits=4),
    PowerSGD(rank=1),
    ErrorFeedback(inner=Lossless(inner=PowerSGD())),
    Lossless(inner=ErrorFeedback(inner=PowerSGD())),
]
every_compressor = pytest.mark.parametrize("compressor", VARIANTS, ids=label)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def ordinary() -> Tree:
    """Ranks 0 to 4, sizes 0 and 1 included."""
    return {
        "conv.weight": normal(0, 4, 3, 2, 2),
        "conv.bias": normal(1, 4),
        "fc.weight": normal(2, 37, 11),
        "empty": torch.zeros(0, 3),
        "scale": torch.tensor(-0.75),
    }


def encode(compressor: Compressor, x: Tree) -> tuple[Packet, Tree]:
    return compressor.encode(x, compressor.init(x), np.random.default_rng(7))


def assert_same(a: Tree, b: Tree) -> None:
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
