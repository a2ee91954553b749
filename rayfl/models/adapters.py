"""LoRA on linear layers of a frozen model: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.

peft (the extra `adapters`) makes the layers: W x + (alpha / rank) B A x with A [rank, in] random and B [out, rank]
zero, so that the initial model equals the frozen one. Frozen weights are constants: stored once per node, never sent or
averaged. DoRA (Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, ICML 2024) also trains the norm of each row of
W + (alpha / rank) B A.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.data.torchvision import torchvision
from rayfl.errors import RayflError, did_you_mean
from rayfl.settings import Settings, shown
from rayfl.tree import Tree

BASE, LORA = ".base_layer.", ".lora_"
FACTOR_A, FACTOR_B, MAGNITUDE = ".lora_A.", ".lora_B.", ".lora_magnitude_vector."


class Adapters(Settings):
    """The `[adapters]` table: the model is frozen, and clients train low-rank additions to some linear layers."""

    layers: tuple[str, ...] = Field(min_length=1, description="names of linear layers, with *, that get an adapter")
    rank: int = Field(default=8, ge=1, description="rank of an adapter")
    alpha: float = Field(default=16.0, gt=0, description="an adapter's output is multiplied by alpha / rank")
    factors: Literal["both", "B"] = Field(
        default="both",
        description="factors that are trained; B: A keeps its initial values and is not sent",
    )
    merged: bool = Field(
        default=False, description="the layers' own weights can change too, for a server that merges adapters (flora)"
    )
    dora: bool = Field(default=False, description="DoRA: also train the norms of the rows of the adapted weights")
    trained: tuple[str, ...] = Field(
        default=(), description="names of parameters, with *, that are trained as they are, for example a new head"
    )

    def builder(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """A function that makes the module of `build` with its adapters (`adapted`); it pickles if `build` does."""
        return partial(self.adapted, build)

    def adapted(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model with its adapters. Raise RayflError without peft, and for names that it does not have."""
        # peft imports torchvision, which this makes importable. Old versions compute at import, which needs numbers
        # even while a skeleton is built without any.
        with torch.device("cpu"):
            torchvision()
            try:
                from peft import LoraConfig, inject_adapter_in_model
            except ModuleNotFoundError:
                raise RayflError(" needs peft; run: pip install 'rayfl[adapters]'", ("adapters",)) from None
        module = build()
        linear = [name for name, layer in module.named_modules() if is_linear(layer)]
        names = _matching(self.layers, linear, "layers", "linear layer")
        trained = _matching(self.trained, [name for name, _ in module.named_parameters()], "trained", "parameter")
        with warnings.catch_warnings():
            # peft warns of layers that share weights with others; these weights stay frozen.
            warnings.simplefilter("ignore")
            # A regular expression matches whole names; in a list, each name would also match the end of another.
            pattern = "|".join(map(re.escape, names))
            config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=pattern, use_dora=self.dora)  # pyright: ignore[reportArgumentType] (a float will do)
            inject_adapter_in_model(config, module)
        for name, parameter in module.named_parameters():
            is_factor = LORA in name and not (self.factors == "B" and FACTOR_A in name)
            is_merged = self.merged and name.endswith(f"{BASE}weight")
            parameter.requires_grad_(is_factor or is_merged or name.replace(BASE, ".") in trained)
        return module


def is_linear(layer: nn.Module) -> bool:
    """Whether the layer is linear. In transformers, GPT-2's are called Conv1D, and their weight is [in, out]."""
    kind = type(layer)
    return isinstance(layer, nn.Linear) or f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"


def factor_pairs(params: Tree) -> list[tuple[str, str]]:
    """The names of the factors A [rank, in] and B [out, rank] of every adapter whose factors are both in `params`."""
    pairs = [(name, name.replace(FACTOR_A, FACTOR_B)) for name in params if FACTOR_A in name]
    return [(a, b) for a, b in pairs if b in params]


def base_weight(factor: str) -> str:
    """The name of the weight that the adapter with this factor is added to."""
    return f"{factor.partition(LORA)[0]}{BASE}weight"


@dataclass(frozen=True)
class Scale:
    """How a layer adds the product of its factors to its weight."""

    factor: float  # alpha / rank
    transposed: bool

    def added(self, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """factor * B A in the shape of the weight."""
        product = self.factor * (b @ a)
        return product.T if self.transposed else product


def scales(module: nn.Module) -> dict[str, Scale]:
    """The scale of every adapter in a module, by the name of its weight."""
    # Any: layers of peft.
    layers: dict[str, Any] = {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}
    return {
        f"{name}{BASE}weight": Scale(layer.scaling["default"], bool(layer.fan_in_fan_out))
        for name, layer in layers.items()
    }


def _matching(patterns: tuple[str, ...], names: list[str], setting: str, what: str) -> list[str]:
    """The names that patterns match. Raise RayflError for a pattern without one."""
    matched: list[str] = []
    for pattern in patterns:
        of_pattern = [name for name in names if fnmatchcase(name, pattern)]
        if not of_pattern:
            raise RayflError(
                f" has {shown(pattern)}, which names no {what} of the model; {did_you_mean(pattern, names)}",
                ("adapters", setting),
            )
        matched += of_pattern
    return list(dict.fromkeys(matched))
