"""FedDST: Bibikar, Vikalo, Wang, Chen, Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet
Learning Better, AAAI 2022, Algorithm 1.

The global model has a mask M of a constant number of entries in every layer. Clients get x o M and train it under M.
In every `readjust_every`th round they also move the mask: of each layer's kept entries the share alpha_t with the
smallest |w| is dropped, and as many entries with the largest |gradient| among all that are then idle are grown, at 0.
The server takes the mean of every entry over the clients that keep it, weighted by examples, and keeps the largest
|x| of each layer.

    alpha_t = alpha / 2 (1 + cos(pi t / T_end))

Where paper and code differ or leave something open:
- The gradient is that of one further minibatch, at the trained weights before entries are dropped.
- Dropped entries may be grown at once, and then start at 0 as all grown ones.
- Rounds 0, `readjust_every`, ... before T_end (`readjust_end`) move masks.
- An entry of the old mask that no client that delivered has kept leaves the mask.
- The share of zeros of a layer is proportional to 1 - (sum of its dimensions) / (their product), as in the code;
  biases and norms are dense. The first mask has the largest |x| of each layer's initial weights.
- The code has a constant alpha, and drops its grown entries again where they were kept before.
- Uplink and downlink bits have the positions of a mask only where the other end does not know it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NotRequired, Self

from rayfl.compress.largest import top_k_mask
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    Plan,
    RayflError,
    Received,
    Stage,
    State,
    Traits,
    Tree,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.common_mask import CommonMask, SparseCarry, prunable, sent_weights
from rayfl.methods.shared.local_training import LocalTraining, weighed
from rayfl.methods.shared.masked_server import WEIGHTS
from rayfl.models import flops

TRAIN, SEARCH = "train", "search"


class FedDSTHyper(LocalTraining):
    """Hyper-parameters of FedDST, with the values of its code."""

    lr: float = Field(default=0.01, gt=0, description="client learning rate, eta")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of sgd and nesterov")
    weight_decay: float = Field(default=1e-3, ge=0, description="L2 penalty added to the gradient")
    default_epochs = 10
    epochs: int | None = Field(default=None, ge=1, description="local epochs per round (10 where steps is not given)")
    sparsity: float = Field(default=0.8, ge=0, lt=1, description="share of the layers' entries that are 0")
    distribution: Literal["erk", "uniform"] = Field(
        default="erk", description="zeros of the layers: in proportion to 1 - sum / product of dimensions, or equal"
    )
    readjust: float = Field(default=0.5, ge=0, le=1, description="share of the kept entries that round 0 moves, alpha")
    readjust_every: int = Field(default=10, ge=1, description="rounds from one move of the masks to the next")
    readjust_end: int | None = Field(
        default=None, ge=1, description="round from which masks stay, T_end (left out: half of the experiment's rounds)"
    )

    def for_num_rounds(self, rounds: int) -> Self:
        completed = super().for_num_rounds(rounds)
        if completed.readjust_end is not None:
            return completed
        return completed.model_copy(update={"readjust_end": max(1, rounds // 2)})

    def moved_share(self, round_number: int) -> float:
        """alpha_t in a round that moves masks, else 0; `for_num_rounds` must have given it an end."""
        assert self.readjust_end is not None, "see for_num_rounds"
        if round_number % self.readjust_every or round_number >= self.readjust_end:
            return 0.0
        return self.readjust / 2 * (1 + math.cos(math.pi * round_number / self.readjust_end))


class FedDSTCarry(SparseCarry):
    """A client's carry."""

    gradient: NotRequired[Tree]  # of the search


class FedDST(CommonMask):
    """Clients drop small entries and grow those with large gradients; the server prunes their mean."""

    hyper: FedDSTHyper
    paper = "Bibikar et al., AAAI 2022"
    capabilities = Capabilities(on_device=True, own_compression=True, depends_on_num_rounds=True)

    def check_model(self, params: Tree) -> None:
        self.first_mask(params)

    def plan(self, round_number: int, coin: float) -> Plan:
        train = self.hyper.stage(round_number)
        search = replace(train, name=SEARCH, epochs=None, steps=1)
        return Plan(stages=(train, search) if self.hyper.moved_share(round_number) else (train,))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> masks.Masked:
        return {"mask": self.first_mask(params)}

    def init_server(self, params: Tree) -> masks.MaskedModel:
        mask = self.first_mask(params)
        return {"params": masks.masked(params, mask), "mask": mask}

    def first_mask(self, params: Tree) -> Tree:
        """The largest |x| of every layer. Raise RayflError if a layer would keep nothing."""
        layers = prunable(params)
        zeros = zero_shares(layers, self.hyper.sparsity, self.hyper.distribution)
        mask = masks.everything(params)
        for name, layer in layers.items():
            kept = int((1 - zeros[name]) * layer.numel() + 1e-9)
            if kept < 1:
                raise RayflError(
                    f"method.sparsity={self.hyper.sparsity} leaves layer {name!r} of {layer.numel()} entries none; "
                    "lower it, or set method.distribution='uniform'"
                )
            mask[name] = top_k_mask(layer.reshape(-1), kept).view(layer.shape)
        return mask

    def mask_for(self, server: masks.MaskedModel, ctx: Context) -> Tree:
        return server["mask"]

    def trains_under(self, state: masks.Masked, stage: Stage, ctx: Context) -> Tree | None:
        return None if stage.name == SEARCH else state["mask"]

    def begin(self, state: State, received: Message, ctx: Context) -> FedDSTCarry:
        carry: FedDSTCarry = {**super().begin(state, received, ctx)}
        # The search replaces the gradient.
        return {**carry, "gradient": carry["params"]} if len(ctx.plan.stages) > 1 else carry

    def step(self, carry: FedDSTCarry, batch: Batch, *, stage: Stage) -> FedDSTCarry:
        if stage.name == SEARCH:
            return {**carry, "gradient": self.task.grad(carry["params"], batch, self.task.evaluated_loss)}
        return super().step(carry, batch, stage=stage)

    def finish(self, state: State, carry: FedDSTCarry, ctx: Context) -> Finished:
        params, mask, gradient = carry["params"], dict(carry["mask"]), carry.get("gradient", {})
        share = self.hyper.moved_share(ctx.round)
        for name, weight in prunable(params).items() if gradient else ():
            if not bool(mask[name].all()):
                left, count = masks.without_smallest(name, mask[name], weight, share)
                mask[name] = masks.with_regrown(left, count, masks.by_gradient(name, gradient[name]))
                # What is dropped starts again at 0 if it is grown.
                params = {**params, **masks.masked({name: weight}, {name: left})}
        message, weight_in_mean = weighed(sent_weights(params, mask, carry["known"]), self.hyper.weighting, ctx)
        trained, searched = (ctx.work[name].num_examples if name in ctx.work else 0 for name in (TRAIN, SEARCH))
        counted = flops.training_metrics(self.task.weight_uses, carry["known"], trained, searched)
        return Finished(
            {"mask": carry["known"]}, message, weight_in_mean, {**self.train_loss(carry, ctx, TRAIN), **counted}
        )

    def update(self, server: masks.MaskedModel, received: Received, ctx: Context) -> masks.MaskedModel:
        mean, held, mask = received[WEIGHTS].result, received[WEIGHTS].weights, dict(server["mask"])
        for name, values in prunable(mean).items() if self.hyper.moved_share(ctx.round) else ():
            mask[name] = masks.largest_held(values, held[name] > 0, int(mask[name].sum()))
        return {"params": masks.masked(mean, mask), "mask": mask}


def zero_shares(layers: Tree, sparsity: float, distribution: str) -> Mapping[str, float]:
    """The share of zeros in each layer; over all entries together it is `sparsity`."""
    if distribution == "uniform":
        return dict.fromkeys(layers, sparsity)
    raw = {name: max(0.0, 1 - sum(layer.shape) / layer.numel()) for name, layer in layers.items()}
    total = sum(raw[name] * layer.numel() for name, layer in layers.items())
    scale = sparsity * sum(layer.numel() for layer in layers.values()) / total if total > 0 else 0.0
    return {name: scale * share for name, share in raw.items()}
