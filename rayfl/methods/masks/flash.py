"""FLASH: Babakniya, Kundu, Prakash, Niu, Avestimehr, Revisiting Sparsity Hunting in Federated Learning: Why does
Sparsity Consensus Matter?, TMLR 2023.

Round 0 finds how dense each layer should be. Its clients train under one random mask of density d for `warm_up_epochs`
epochs, move their masks after each of these but the last, and send their masks alone. With d_l the mean density of
layer l in these masks and n_l its number of entries, the layer gets the density

    q_l = min(1, d_l d sum n / sum d_l n_l)

The server draws the mask, entry by entry with probability q_l, and training begins at the initial weights.
- `variant="spdst"`: FedAvg under this mask, which never changes.
- `variant="jmwst"`: in every `move_every`th round clients also move their masks while they train. The server takes the
  mean of the weights, with 0 for what a client has dropped, and keeps the int(q_l n_l) largest |x| of each layer.

A move drops the share `moved` (1 - progress of the round) of each layer's kept entries, those with the smallest |w|. As
many entries as were dropped in all layers together are grown at random, in a layer in proportion to the mean |w| of its
kept entries.

With `clients.retention_ratio`, client i keeps the share r_i of the mask's entries in each layer, those with the largest
|x|, so that masks are nested; the server then takes the mean over those that keep an entry.

Where paper and code differ or leave something open:
- The share of a move falls with the stages of the round; the code lowers it after every step.
- With one local epoch, or with `steps`, masks move at the middle of the local work, as in the code; its two halves are
  passes of their own over the data.
- If no mask of round 0 arrives, all layers have the density d.
- Entries outside the mask are 0 in the global model. Biases and norms are dense. Clients count the same.
- What a full layer cannot grow, the other layers grow.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from rayfl.compress.masks import mask_packet
from rayfl.methods.base import (
    Aggregate,
    Capabilities,
    Context,
    Delivered,
    ElementwiseMean,
    Field,
    Finished,
    FirstDraws,
    Message,
    Metrics,
    Plan,
    Received,
    Stage,
    State,
    Sum,
    Traits,
    Tree,
    tree,
    unused_with,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.common_mask import CommonMask, SparseCarry, prunable, sent_weights
from rayfl.methods.shared.local_training import LocalWork
from rayfl.methods.shared.masked_server import WEIGHTS
from rayfl.methods.shared.step_draws import first_key, next_key
from rayfl.models import flops

MASK = "mask"


class FlashHyper(LocalWork):
    """Hyper-parameters of FLASH, with the values of its code."""

    lr: float = Field(default=0.1, gt=0, description="client learning rate, eta")
    variant: Literal["spdst", "jmwst"] = Field(
        default="spdst", description="spdst: the mask stays after round 0; jmwst: clients and server move it"
    )
    density: float = Field(default=0.1, gt=0, le=1, description="share of the layers' entries that are kept, d")
    warm_up_epochs: int = Field(default=10, ge=1, description="epochs in round 0, after which masks are sent")
    moved: float = Field(
        default=0.25, gt=0, le=1, description="share of a layer's kept entries that moves at the beginning of a round"
    )
    move_every: int = Field(
        default=1,
        ge=1,
        description="rounds from one move of the mask to the next, r_int",
        json_schema_extra=unused_with(variant=["spdst"]),
    )

    def moves(self, round_number: int) -> bool:
        """Whether clients move their masks in a round."""
        return not round_number or (self.variant == "jmwst" and (round_number - 1) % self.move_every == 0)


class FlashServer(masks.MaskedModel):
    """The server's state."""

    kept: Tree  # by layer, the number of entries that it keeps


class FlashCarry(SparseCarry):
    """A client's carry."""

    key: torch.Tensor  # of the draws of the next move


class Flash(CommonMask):
    """One sparse mask that fits the layers' sensitivity, and FedAvg under it."""

    hyper: FlashHyper
    paper = "Babakniya et al., TMLR 2023"
    capabilities = Capabilities(on_device=True, own_compression=True, honours_retention=True, may_be_silent=True)
    gather = {WEIGHTS: ElementwiseMean("sent"), MASK: Sum()}

    def plan(self, round_number: int, coin: float) -> Plan:
        train, hyper = self.hyper.stage(round_number), self.hyper
        if not round_number:
            return Plan(stages=_parts(replace(train, epochs=1, steps=None), hyper.warm_up_epochs))
        if not hyper.moves(round_number):
            return Plan(stages=(train,))
        if train.epochs and train.epochs > 1:
            return Plan(stages=_parts(replace(train, epochs=1), train.epochs))
        if train.epochs:
            return Plan(stages=_parts(replace(train, share=0.5), 2))
        steps = train.steps or 1
        later = (replace(train, name="part 1 of 2", steps=steps // 2),) if steps > 1 else ()
        return Plan(stages=(replace(train, name="part 0 of 2", steps=steps - steps // 2), *later))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> masks.Masked:
        return {"mask": self.first_mask(params, draws)}

    def init_server(self, params: Tree) -> FlashServer:
        kept = {name: torch.zeros((), dtype=torch.int64) for name in prunable(params)}
        return {"params": params, "mask": masks.everything(params), "kept": kept}

    def first_mask(self, params: Tree, draws: FirstDraws) -> Tree:
        """The random mask of round 0."""
        return masks.random_mask(params, dict.fromkeys(prunable(params), self.hyper.density), draws.common(MASK))

    def mask_for(self, server: FlashServer, ctx: Context) -> Tree:
        client, mask = ctx.traits, dict(server["mask"])
        if not ctx.round:
            return self.first_mask(server["params"], FirstDraws(ctx.seed, client.id))
        for name, weight in prunable(server["params"]).items() if client.retention_ratio < 1 else ():
            count = max(1, int(client.retention_ratio * int(mask[name].sum()) + 1e-9))
            mask[name] = masks.largest_held(weight, mask[name], count)
        return mask

    def begin(self, state: State, received: Message, ctx: Context) -> FlashCarry:
        return {**super().begin(state, received, ctx), "key": first_key(ctx.generator)}

    def end_stage(self, carry: FlashCarry, *, stage: Stage) -> FlashCarry:
        if not stage.name.startswith("part "):
            return carry
        part, _, parts = stage.name.removeprefix("part ").partition(" of ")
        progress = (int(part) + 1) / int(parts)
        if progress == 1:
            return carry
        generator = np.random.default_rng(int(carry["key"]) % (1 << 64))
        mask = moved(carry["mask"], carry["params"], self.hyper.moved * (1 - progress), generator)
        params = masks.masked(carry["params"], mask)
        return {**carry, "mask": mask, "params": params, "key": next_key(carry["key"])}

    def finish(self, state: State, carry: FlashCarry, ctx: Context) -> Finished:
        mask, num_examples = carry["mask"], sum(work.num_examples for work in ctx.work.values())
        counted = flops.training_metrics(self.task.weight_uses, carry["known"], num_examples)
        if ctx.round:
            message = sent_weights(carry["params"], mask, carry["known"])
        else:
            message = {MASK: mask_packet(prunable(mask))}
        return Finished({"mask": carry["known"]}, message, 1.0, {**self.train_loss(carry, ctx), **counted})

    def server_update(
        self, server: FlashServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[FlashServer, Metrics]:
        if not ctx.round:
            return self.masked_start(received[MASK], ctx), {}
        return (self.update(server, received, ctx) if received[WEIGHTS].count else server), {}

    def masked_start(self, sent: Aggregate, ctx: Context) -> FlashServer:
        """The server's state after round 0: a mask of the densities in clients' masks, on the initial weights."""
        layers, density = prunable(ctx.initial), self.hyper.density
        densities = dict.fromkeys(layers, density)
        if sent.count:
            densities = {name: float(ones.sum()) / (sent.count * ones.numel()) for name, ones in sent.result.items()}
        shares = layer_densities(densities, {name: layer.numel() for name, layer in layers.items()}, density)
        mask = masks.everything(ctx.initial)
        for name, layer in layers.items():
            mask[name] = torch.from_numpy(ctx.generator.random(tuple(layer.shape)) < shares[name])
        kept = {name: torch.tensor(max(1, int(shares[name] * layer.numel() + 1e-9))) for name, layer in layers.items()}
        return {"params": masks.masked(ctx.initial, mask), "mask": mask, "kept": kept}

    def update(self, server: FlashServer, received: Received, ctx: Context) -> FlashServer:
        total, mask, old = received[WEIGHTS], dict(server["mask"]), server["params"]
        held = {name: weight > 0 for name, weight in total.weights.items()}
        if ctx.retention_given:
            mean = total.result
            params = {name: torch.where(held[name], mean[name], value) for name, value in old.items()}
        else:
            params = tree.scale(total.sum, 1.0 / total.weight)
        for name, values in prunable(params).items() if self.hyper.moves(ctx.round) else ():
            mask[name] = masks.largest_held(values, held[name] | mask[name], int(server["kept"][name]))
        return {**server, "params": masks.masked(params, mask), "mask": mask}


def _parts(stage: Stage, count: int) -> tuple[Stage, ...]:
    """`count` stages, after each of which but the last masks move."""
    return tuple(replace(stage, name=f"part {index} of {count}") for index in range(count))


def layer_densities(measured: Mapping[str, float], sizes: Mapping[str, int], density: float) -> dict[str, float]:
    """q_l = min(1, d_l d sum n / sum d_l n_l)."""
    factor = density * sum(sizes.values()) / sum(measured[name] * size for name, size in sizes.items())
    return {name: min(1.0, factor * measured[name]) for name in sizes}


def moved(mask: Tree, params: Tree, share: float, generator: np.random.Generator) -> Tree:
    """The mask after a move of the share `share` of each layer's kept entries."""
    layers = prunable(params)
    importance, left, num_moved = {}, {}, 0
    for name, weight in layers.items():
        kept = mask[name]
        importance[name] = float(weight.abs().sum()) / max(1, int(kept.sum()))
        left[name], count = masks.without_smallest(name, kept, weight, share)
        num_moved += count
    rooms = {name: kept.numel() - int(kept.sum()) for name, kept in left.items()}
    grown = {}
    for name, count in allotted(num_moved, importance, rooms).items():
        grown[name] = masks.with_regrown(left[name], count, masks.at_random(generator))
    return {**mask, **grown}


def allotted(total: int, importance: Mapping[str, float], rooms: Mapping[str, int]) -> dict[str, int]:
    """`total` entries divided over layers in proportion to their importance, at most `rooms` each.

    What does not fit into a layer is divided over the others; fractions are rounded down, and the entries that are then
    left go to the layers with the largest fractions, the first of equal ones. `total` is at most the sum of `rooms`.
    """
    shares = {name: value or 1e-30 for name, value in importance.items()}
    counts = dict.fromkeys(shares, 0.0)
    open_layers = [name for name in shares if rooms[name]]
    while open_layers:
        spare = total - sum(counts[name] for name in shares if name not in open_layers)
        weight = sum(shares[name] for name in open_layers)
        wanted = {name: spare * shares[name] / weight for name in open_layers}
        full = [name for name in open_layers if wanted[name] >= rooms[name]]
        if not full:
            counts |= wanted
            break
        counts |= {name: float(rooms[name]) for name in full}
        open_layers = [name for name in open_layers if name not in full]
    whole = {name: int(count + 1e-9) for name, count in counts.items()}
    by_fraction = sorted(whole, key=lambda name: whole[name] - counts[name])
    for name in by_fraction[: total - sum(whole.values())]:
        whole[name] += 1
    return whole
