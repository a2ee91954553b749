"""FedFomo: Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

Clients train first and mix afterwards, with the models that the others had at the end of their last round. The server
chooses greedily by affinity, ties to the lowest id.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.compress.dense import Dense
from rayfl.data.batches import Batch
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather, Relay
from rayfl.methods.base import Carry, Context, Finished, Metrics, Plan, Reply, ServerHalf, Stage
from rayfl.methods.shared.local_training import GradientMethod, LocalTraining
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class FedFomoHyper(LocalTraining):
    """Hyper-parameters of FedFomo."""

    num_candidates: int = Field(default=2, ge=1, description="other clients' models that a client downloads, M")


class FedFomo(GradientMethod, ServerHalf):
    """Client state: its model. Server's memory of a client: its affinity to every client [N], and whose models it
    was sent last, as a mask [N]."""

    Hyper: ClassVar[type[FedFomoHyper]] = FedFomoHyper
    hyper: FedFomoHyper
    paper: ClassVar[str] = "Zhang et al., ICLR 2021"
    personalized: ClassVar[bool] = True
    splits: ClassVar[Mapping[str, float]] = {"validation": 0.2}
    gather: Mapping[str, Gather] = {"model": Relay()}

    def plan(self, round: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(round), Stage("compare", split="validation", epochs=1)))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"params": params}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        candidates = {name: packet.decode() for name, packet in received.items()}
        losses = torch.zeros(2 + len(candidates))
        return {**self.start(state["params"]), "candidates": candidates, "losses": losses}

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        if stage.name == "train":
            return super().step(carry, batch, stage=stage)
        losses = [self.task.loss(model, batch) for model in (carry["received"], *models(carry))]
        return {**carry, "losses": torch.stack(losses)}

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        if stage.name == "train":
            return carry
        before, losses = carry["received"], carry["losses"]
        moves = [tree.sub(model, before) for model in models(carry)]
        lengths = torch.tensor([tree.norm(move) for move in moves])
        gains = torch.where(lengths > 0, (losses[0] - losses[1:]) / lengths.clamp(min=1e-30), 0.0)
        useful = gains.clamp(min=0.0)
        params = before
        for weight, move in zip((useful / useful.sum().clamp(min=1e-30)).tolist(), moves, strict=True):
            params = tree.add(params, move, weight)
        return {**carry, "params": params, "gains": gains[1:]}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        gains, _ = Dense().encode({"gains": carry["gains"]}, {}, ctx.generator)
        return Finished({"params": carry["params"]}, {"model": carry["params"], "gains": gains})

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        return {"params": carry["params"] if carry is not None else state["params"]}

    def init_server(self, params: Tree) -> State:
        return {"models": {}}

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return {"affinity": torch.zeros(0), "sent": torch.zeros(0, dtype=torch.bool)}

    def model(self, server: State) -> Tree:
        return {}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {}

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        affinity = server_memory["affinity"] if len(server_memory["affinity"]) else torch.zeros(ctx.num_clients)
        others = [int(client) for client in server["models"] if int(client) != ctx.traits.id]
        chosen = sorted(
            sorted(others, key=lambda client: (-float(affinity[client]), client))[: self.hyper.num_candidates]
        )
        sent = torch.zeros(ctx.num_clients, dtype=torch.bool)
        sent[chosen] = True
        message = {f"candidate{place}": server["models"][str(client)].open() for place, client in enumerate(chosen)}
        return Reply(message, {"affinity": affinity, "sent": sent})

    def store_uplink(self, server_memory: State, message: Message, ctx: Context) -> State:
        affinity = server_memory["affinity"].clone()
        affinity[server_memory["sent"]] += message["gains"].decode()["gains"]
        return {**server_memory, "affinity": affinity}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        arrived = {str(client): handle for client, handle in received["model"].items.items()}
        return {"models": {**server["models"], **arrived}}, {}


def models(carry: Carry) -> list[Tree]:
    """The freshly trained model, then the candidates in the order of their clients."""
    return [carry["params"], *(carry["candidates"][name] for name in sorted(carry["candidates"]))]
