"""FLoRA: Wang et al., FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations,
NeurIPS 2024.

Client i trains new adapters of rank r_i (`clients.retention_ratio` of `adapters.rank`) in every round, from a random A
and B = 0. The server stacks them, so that the product is the mean of the clients' products, whatever their ranks:

    A = [p_1 A_1; p_2 A_2; ...],  B = [B_1, B_2, ...],  W <- W + (alpha / rank) B A

Every client merges the stack into its copy of the adapted weights W before it trains again. So the weights of the
adapted layers are part of the model: `adapters.merged=true`. They are never sent at first, since all begin with the
same. A client that missed rounds downloads all the stacks that it missed, or W itself if that is smaller.

Where paper and code differ or leave something open:
- p_i is on A alone, as in the code.
- All clients have the scale alpha / rank of the model.
- Each client draws A from the uniform distribution within 1 / sqrt(in), which is LoRA's.
- A head that is trained beside the adapters is averaged with the same weights p_i.
- The evaluated and saved model has the merged weights, and adapters whose product is 0.
"""

import math
from typing import Any, NotRequired, cast

import torch

from rayfl.compress.base import device_of
from rayfl.methods.base import (
    Batch,
    BoundTask,
    Capabilities,
    Collect,
    Context,
    Delivered,
    Dense,
    Finished,
    HyperParameters,
    Message,
    Metrics,
    ModelState,
    RayflError,
    Received,
    Reply,
    Stage,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.methods.shared.low_rank import LowRank, adapters_packet, collected, weighted_mean
from rayfl.methods.shared.masked_server import WEIGHTS
from rayfl.methods.shared.step_draws import first_key, uniforms
from rayfl.models import flops
from rayfl.models.adapters import BASE, MAGNITUDE, base_weight, factor_pairs, scales
from rayfl.task import NetworkTask

STACKS, MERGED, OTHERS = "stacks", "merged weights", "other parameters"
"""Messages of the server: stacks by round and factor, the adapted weights, and what is trained beside the adapters."""


class FLoRAServer(ModelState):
    """The server's state."""

    stacks: Tree  # the last ones, by merge and factor; older ones are larger than the weights
    merges: torch.Tensor  # their number so far


class MergeMemory(masks.Masked):
    """The server's memory of a client."""

    merges: torch.Tensor  # that the client has


class FLoRAState(masks.Masked):
    """A client's state."""

    merged: NotRequired[Tree]  # its adapted weights, if they are not the initial ones


class FLoRACarry(LocalCarry, masks.Masked):
    """A client's carry."""


class FLoRA(LowRank):
    """The server stacks adapters, and all merge the stack into the weights."""

    paper = "Wang et al., NeurIPS 2024"
    capabilities = Capabilities(on_device=True, personalized=False)
    gather = {WEIGHTS: Collect(), "num_examples": Collect()}

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(task, hyper, **settings)
        self.scales = scales(task.network.module) if isinstance(task, NetworkTask) else {}

    def check_model(self, params: Tree) -> None:
        super().check_model(params)
        if any(base_weight(a) not in params for a, _ in factor_pairs(params)):
            raise RayflError("FLoRA merges adapters into the weights of their layers; set adapters.merged=true")
        if any(MAGNITUDE in name for name in params):
            raise RayflError("FLoRA cannot merge DoRA's norms; remove adapters.dora")

    def init_server(self, params: Tree) -> FLoRAServer:
        return {"params": {**params, **_zero_products(params)}, "stacks": {}, "merges": torch.tensor(0)}

    def init_server_memory(self, client: Traits, params: Tree) -> MergeMemory:
        return {**super().init_server_memory(client, params), "merges": torch.tensor(0)}

    def personal_message(self, server: FLoRAServer, server_memory: MergeMemory, ctx: Context) -> Reply:
        params, last = server["params"], int(server_memory["merges"])
        missed = {name: factor for name, factor in server["stacks"].items() if _merge_of(name) >= last}
        weights = _adapted_weights(params)
        is_complete = len({_merge_of(name) for name in missed}) == int(server["merges"]) - last
        parts: dict[str, Tree] = {OTHERS: _others(params)}
        if missed or not is_complete:
            small = is_complete and tree.num_entries(missed) < tree.num_entries(weights)
            parts |= {STACKS: missed} if small else {MERGED: weights}
        message = {name: Dense().encode(part, {}, ctx.generator)[0] for name, part in parts.items() if part}
        return Reply(message, {**server_memory, "merges": server["merges"]})

    def store_uplink(self, server_memory: MergeMemory, message: Message, ctx: Context) -> MergeMemory:
        return server_memory

    def begin(self, state: FLoRAState, received: Message, ctx: Context) -> FLoRACarry:
        initial, mask, decoded = ctx.initial, state["mask"], {name: part.decode() for name, part in received.items()}
        weights = state.get("merged", _adapted_weights(initial))
        weights = decoded.get(MERGED) or self.merged(weights, decoded.get(STACKS, {}))
        factors = _new_factors(initial, mask, first_key(ctx.generator).to(device_of(initial)))
        trained = {**factors, **decoded.get(OTHERS, {})}
        params = {name: trained[name] if name in trained else weights[name] for name in initial}
        return {**self.start(_trained(params)), "params": params, "received": params, "mask": mask}

    def merged(self, weights: Tree, stacks: Tree) -> Tree:
        """The weights after the merges of `stacks`, in their order."""
        weights = dict(weights)
        for merge in sorted({_merge_of(name) for name in stacks}):
            factors = {name.partition(" ")[2]: factor for name, factor in stacks.items() if _merge_of(name) == merge}
            for a, b in factor_pairs(factors):
                name = base_weight(a)
                weights[name] = weights[name] + self.scales[name].added(factors[b], factors[a])
        return weights

    def step(self, carry: FLoRACarry, batch: Batch, *, stage: Stage) -> FLoRACarry:
        params, trained = carry["params"], _trained(carry["params"])
        weights = {name: tensor for name, tensor in params.items() if name not in trained}
        loss, gradient = self.task.value_and_grad(
            trained, batch, lambda moving, batch: self.task.loss({**weights, **moving}, batch)
        )
        inside = cast(FLoRACarry, {**carry, "params": trained})
        moved = self.descend(inside, loss, self.direction(carry, gradient), stage)
        merged = {name: moved["params"].get(name, params[name]) for name in params}
        return cast(FLoRACarry, {**moved, "params": merged})

    def finish(self, state: FLoRAState, carry: FLoRACarry, ctx: Context) -> Finished:
        params, mask = carry["params"], carry["mask"]
        weights, sent = _adapted_weights(params), _trained(params)
        message = adapters_packet(sent, {name: mask[name] for name in sent})
        finished = self.finished({"mask": mask, "merged": weights}, message, carry, ctx)
        return Finished(
            finished.state, finished.message, finished.weight, {**finished.metrics, **self.counted(weights, mask, ctx)}
        )

    def counted(self, weights: Tree, mask: Tree, ctx: Context) -> Metrics:
        """The operations of the training; the adapted weights have no gradient of their own."""
        uses, num_examples = self.task.weight_uses, sum(work.num_examples for work in ctx.work.values())
        if not uses:
            return {}
        frozen = sum(2 * uses[name] * weight.numel() for name, weight in weights.items())
        gradient = flops.gradient_flops(uses, flops.forward_flops(uses, mask)) - frozen
        return {"flops/training": num_examples * gradient}

    def server_update(
        self, server: FLoRAServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[FLoRAServer, Metrics]:
        trees, weights = collected(received)
        if not trees:
            return server, {}
        merge, params = int(server["merges"]), dict(server["params"])
        stack: Tree = {}
        for a, b in factor_pairs(params):
            ranks = [_filled(each[b]) for each in trees]
            stack[f"{merge} {a}"] = torch.cat(
                [each[a][:rank] * weight for each, rank, weight in zip(trees, ranks, weights, strict=True)]
            )
            stack[f"{merge} {b}"] = torch.cat([each[b][:, :rank] for each, rank in zip(trees, ranks, strict=True)], 1)
        base = _adapted_weights(params)
        params |= self.merged(base, stack)
        params |= weighted_mean([_others(each) for each in trees], weights)
        stacks = _newest({**server["stacks"], **stack}, tree.num_entries(base))
        return {"params": params, "stacks": stacks, "merges": server["merges"] + 1}, {}


def _merge_of(name: str) -> int:
    """The number of the merge of a stack's factor."""
    return int(name.partition(" ")[0])


def _newest(stacks: Tree, most: int) -> Tree:
    """The newest stacks that together have fewer than `most` entries."""
    kept: Tree = {}
    for merge in sorted({_merge_of(name) for name in stacks}, reverse=True):
        kept = {**{name: factor for name, factor in stacks.items() if _merge_of(name) == merge}, **kept}
        if tree.num_entries(kept) >= most:
            return {name: factor for name, factor in kept.items() if _merge_of(name) > merge}
    return kept


def _filled(b: torch.Tensor) -> int:
    """The number of columns up to the last one that is not 0, at least 1."""
    return max([1, *(b.count_nonzero(0).nonzero().flatten() + 1).tolist()])


def _trained(params: Tree) -> Tree:
    """What clients train: all but the adapted weights."""
    return {name: tensor for name, tensor in params.items() if not name.endswith(f"{BASE}weight")}


def _adapted_weights(params: Tree) -> Tree:
    return {name: tensor for name, tensor in params.items() if name.endswith(f"{BASE}weight")}


def _others(params: Tree) -> Tree:
    """What is trained beside the adapters."""
    factors = {name for pair in factor_pairs(params) for name in pair}
    return {name: tensor for name, tensor in _trained(params).items() if name not in factors}


def _zero_products(params: Tree) -> Tree:
    return {b: torch.zeros_like(params[b]) for _, b in factor_pairs(params)}


def _new_factors(initial: Tree, mask: Tree, key: torch.Tensor) -> Tree:
    """A random and B = 0, in the entries of the mask."""
    factors = _zero_products(initial)
    likes = {a: initial[a] for a, _ in factor_pairs(initial)}
    for name, drawn in uniforms(key, likes).items():
        factors[name] = (2 * drawn - 1) / math.sqrt(drawn.shape[1]) * mask[name]
    return factors
