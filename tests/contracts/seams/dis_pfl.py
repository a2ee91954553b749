"""Dis-PFL: Dai et al., DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized Sparse
Training, ICML 2022, Algorithm 1 with equal densities in place of ERK.

A round here ends with the exchange that the paper's next round begins with. All start from one model, so the exchange
before the first round would change nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.compress.sparse import sparse_packet, top_k_positions
from rayfl.data.batches import Batch
from rayfl.gather import Aggregate, ElementwiseMean, Gather
from rayfl.methods.base import Carry, Context, Finished, PeerHalf, Plan, Stage, Traits
from rayfl.training import GradientMethod, LocalTraining
from rayfl.tree import State, Tree


class DisPFLHyper(LocalTraining):
    """Hyper-parameters of Dis-PFL."""

    density: float = Field(0.5, gt=0, le=1, description="share of the entries that a peer keeps")
    anneal: float = Field(0.5, ge=0, le=1, description="share of the kept entries that the first search moves, alpha_0")


class DisPFL(GradientMethod, PeerHalf):
    """State: weights, and the mask of the next training."""

    Hyper: ClassVar[type[DisPFLHyper]] = DisPFLHyper
    hyper: DisPFLHyper
    paper: ClassVar[str] = "Dai et al., ICML 2022"
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {"weights": ElementwiseMean("sent")}

    def plan(self, round: int, coin: float) -> Plan:
        train = self.hyper.stage(round)
        return Plan(stages=(train, replace(train, name="search", epochs=None, steps=1)))

    def init_client(self, client: Traits, params: Tree, generator: np.random.Generator) -> State:
        def random_mask(tensor: Tensor) -> Tensor:
            mask = torch.zeros(tensor.numel(), dtype=torch.bool)
            kept = generator.permutation(tensor.numel())[: int(self.hyper.density * tensor.numel())]
            mask[torch.from_numpy(kept)] = True
            return mask.reshape(tensor.shape)

        mask = tree.map(random_mask, params)
        return {"params": tree.mul(params, mask), "mask": mask}

    def begin(self, state: State, received: Message | None, ctx: Context) -> Carry:
        return {**self.start(state["params"]), "mask": state["mask"], "gradient": state["params"]}

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        if stage.name == "search":
            return {**carry, "gradient": self.task.grad(carry["params"], batch)}
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        carry = self.descend(carry, loss, gradient, stage)
        return {**carry, "params": tree.mul(carry["params"], carry["mask"])}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        share = self.hyper.anneal / 2 * (1 + math.cos(math.pi * ctx.round / ctx.num_rounds))
        mask = {name: self.search(name, carry, share) for name in carry["mask"]}
        message = {"weights": sparse_packet(carry["params"], carry["mask"])}
        return Finished({"params": carry["params"], "mask": mask}, message, 1.0, self.train_loss(carry, ctx))

    def search(self, name: str, carry: Carry, share: float) -> Tensor:
        """One tensor's next mask: the smallest kept weights go, as many of the largest gradients come."""
        shape = carry["mask"][name].shape
        mask, weight, gradient = (carry[part][name].numpy().reshape(-1) for part in ("mask", "params", "gradient"))
        kept = np.flatnonzero(mask)
        num_moved = math.ceil(share * len(kept))
        new = np.zeros(len(mask), bool)
        new[kept[top_k_positions(weight[kept], len(kept) - num_moved)]] = True
        idle = np.flatnonzero(~new)
        new[idle[top_k_positions(gradient[idle], num_moved)]] = True
        return torch.from_numpy(new).reshape(shape)

    def mix(self, state: State, received: Mapping[str, Aggregate], ctx: Context) -> State:
        average = received["weights"].result if received else state["params"]
        return {**state, "params": tree.mul(average, state["mask"])}

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        return {"params": carry["params"] if carry is not None else state["params"]}
