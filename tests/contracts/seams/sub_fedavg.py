"""Sub-FedAvg (unstructured): Vahidian et al., Personalized Federated Learning by Structured and Unstructured Pruning
under Data Heterogeneity, ICDCS Workshops 2021.

The gate is the loss on a validation split, which quadratics have; tensors of one dimension are never pruned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.compress.sparse import sparse_packet
from rayfl.data.batches import Batch
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, ElementwiseMean, Gather
from rayfl.methods.base import Carry, Context, Finished, Metrics, Plan, Reply, ServerHalf, Stage
from rayfl.methods.shared.local_training import GradientMethod, LocalTraining
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class SubFedAvgHyper(LocalTraining):
    """Hyper-parameters of Sub-FedAvg."""

    prune_ratio: float = Field(
        default=0.2, gt=0, lt=1, description="share of the living weights that a pruning removes"
    )
    min_distance: float = Field(
        default=1e-4, ge=0, description="smallest share of entries in which the two masks differ"
    )
    target_density: float = Field(default=0.3, ge=0, le=1, description="density at which pruning ends")
    max_loss: float = Field(default=5.0, gt=0, description="largest validation loss of a pruned model")


class SubFedAvg(GradientMethod, ServerHalf):
    """Client state, and the server's memory of a client: the client's mask."""

    Hyper: ClassVar[type[SubFedAvgHyper]] = SubFedAvgHyper
    hyper: SubFedAvgHyper
    paper: ClassVar[str] = "Vahidian et al., ICDCSW 2021"
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True
    splits: ClassVar[Mapping[str, float]] = {"validation": 0.2}
    gather: Mapping[str, Gather] = {"model": ElementwiseMean("sent")}

    def plan(self, round: int, coin: float) -> Plan:
        first = replace(self.hyper.stage(round, "first"), epochs=1)
        rest = replace(self.hyper.stage(round, "rest"), epochs=(self.hyper.epochs or 2) - 1)
        return Plan(stages=(first, rest, Stage("gate", split="validation", epochs=1)))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"mask": everything(params), "params": params}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        carry = self.start(received["model"].decode())
        return {**carry, "mask": state["mask"], "early": state["mask"], "late": state["mask"], "gate": torch.zeros(())}

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        if stage.name == "gate":
            return {**carry, "gate": self.task.loss(tree.mul(carry["params"], carry["late"]), batch)}
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        return self.descend(carry, loss, tree.mul(gradient, carry["mask"]), stage)

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        if stage.name == "first":
            return {**carry, "early": self.pruned(carry)}
        if stage.name == "rest":
            return {**carry, "late": self.pruned(carry)}
        if not self.opens(carry):
            return carry
        return {**carry, "mask": carry["late"], "params": tree.mul(carry["params"], carry["late"])}

    def pruned(self, carry: Carry) -> Tree:
        """The mask without the smallest living weights: those strictly below the quantile of their tensor."""

        def prune(mask: Tensor, weight: Tensor) -> Tensor:
            if weight.dim() < 2:
                return mask
            return mask & (weight.abs() >= weight[mask].abs().quantile(self.hyper.prune_ratio))

        return {name: prune(mask, carry["params"][name]) for name, mask in carry["mask"].items()}

    def opens(self, carry: Carry) -> bool:
        """Whether the client adopts its late mask."""
        prunable = [name for name, mask in carry["mask"].items() if mask.dim() > 1]
        size = sum(carry["mask"][name].numel() for name in prunable)
        alive = sum(int(carry["mask"][name].sum()) for name in prunable)
        differ = sum(int((carry["early"][name] != carry["late"][name]).sum()) for name in prunable)
        dense = alive / size > self.hyper.target_density
        return dense and differ / size > self.hyper.min_distance and float(carry["gate"]) < self.hyper.max_loss

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        message = {"model": sparse_packet(carry["params"], carry["mask"])}
        return Finished({"mask": carry["mask"], "params": carry["params"]}, message)

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        if carry is not None:
            return {"params": carry["params"]}
        assert model is not None
        return {"params": tree.mul(model, state["mask"])}

    def init_server(self, params: Tree) -> State:
        return {"params": params}

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return {"mask": everything(params)}

    def model(self, server: State) -> Tree:
        return server["params"]

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {}

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        return Reply({"model": sparse_packet(server["params"], server_memory["mask"])}, server_memory)

    def store_uplink(self, server_memory: State, message: Message, ctx: Context) -> State:
        return {"mask": message["model"].support()}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        arrived = received["model"]
        if not arrived.count:
            return server, {}
        kept = {name: counts > 0 for name, counts in arrived.weights.items()}
        mean = arrived.result
        return {"params": {n: torch.where(kept[n], mean[n], old) for n, old in server["params"].items()}}, {}


def everything(params: Tree) -> Tree:
    """The mask that keeps every entry."""
    return {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in params.items()}
