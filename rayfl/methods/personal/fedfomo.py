"""FedFomo: Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

A client downloads the models of M other clients and moves towards those that have a low loss on its data. On its
validation split it measures the loss L_i of each candidate theta_n: the model that it has just trained and those M.

q_n = (L_i(theta_i) - L_i(theta_n)) / ||theta_n - theta_i||,   w_n = max(q_n, 0) / sum_n max(q_n, 0),
theta_i <- theta_i + sum_n w_n (theta_n - theta_i),

with theta_i its model before the round, which it keeps if no q_n is positive. The server remembers how much
client i has gained from client j, P_ij = the sum of their q, and sends client i the models of the M clients with the
largest P_ij; with probability epsilon_t = max(0, epsilon - epsilon_decay t) each of them is replaced by a random one.

Where the sources differ or are silent:
- Clients train first and mix afterwards, as in Dis-PFL's code; PFLlib mixes first. The others' models are those of the
  end of the last round in which they delivered; in round 0 there are none, as all have the common start.
- A candidate at distance 0 has q = 0. Of equal P_ij the lowest id comes first.
- The server forwards packets without decoding them. The client reports the q of the others' models, 4 bytes each, from
  which the server computes P.
- Right after local training a client is evaluated with the model that it has trained, before it mixes.
- Models are sent dense: a downlink compressor would have to decode the packets that the server only forwards.
"""

from collections.abc import Sequence
from typing import TypedDict, cast

import torch

from rayfl.gather import Handle
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Dense,
    Field,
    Finished,
    Message,
    ModelState,
    Plan,
    RayflError,
    Received,
    Relay,
    Reply,
    ServerHalf,
    Stage,
    Topology,
    Traits,
    Tree,
    tree,
    unused_with,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, OwnModel

TRAIN, COMPARE = "train", "compare"

LARGEST_BATCH = 1000
"""Validation examples on which candidates are compared at once."""

DEFAULT_CANDIDATES = 10


class FedFomoHyper(LocalWork):
    """Hyper-parameters of FedFomo."""

    num_candidates: int | None = Field(
        default=None,
        ge=1,
        description="others' models that a client downloads, M (left out: 10, or all others where they are fewer)",
    )
    epsilon: float = Field(default=0.3, ge=0, le=1, description="chance in round 0 that a model is chosen at random")
    epsilon_decay: float = Field(
        default=0.05,
        ge=0,
        description="by how much epsilon falls a round",
        json_schema_extra=unused_with(epsilon=[0]),
    )


class FedFomoCarry(LocalCarry):
    """A client's carry."""

    others: dict[str, Tree]  # the received models
    losses: torch.Tensor  # sums over the validation examples: of theta_i, the trained model, and the others


class FedFomoServer(TypedDict):
    """Server state."""

    models: dict[str, Handle]  # the last packet of each client


class FedFomoMemory(TypedDict):
    """The server's memory of a client."""

    affinity: torch.Tensor  # P_i [num_clients]
    sent: torch.Tensor  # the clients whose models it received last, a mask [num_clients]


class FedFomo(OwnModel, GradientMethod, ServerHalf):
    """Client state: its model. The server sends it other clients' models."""

    hyper: FedFomoHyper
    paper = "Zhang et al., ICLR 2021"
    capabilities = Capabilities(on_device=True, own_compression=True)
    splits = {"validation": 0.2}
    gather = {"model": Relay()}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        if (self.hyper.num_candidates or 0) >= num_clients:
            raise RayflError(
                f"={self.hyper.num_candidates} is more than the {num_clients - 1} other clients that a client has; "
                "give at most as many",
                ("method", "num_candidates"),
            )

    def plan(self, round_number: int, coin: float) -> Plan:
        compare = Stage(COMPARE, split="validation", epochs=1, batch_size=LARGEST_BATCH)
        return Plan(stages=(self.hyper.stage(round_number, TRAIN), compare))

    def begin(self, state: ModelState, received: Message, ctx: Context) -> FedFomoCarry:
        others = {name: packet.decode() for name, packet in received.items()}
        losses = torch.zeros(2 + len(others), dtype=torch.float64)
        return {**self.start(state["params"]), "others": others, "losses": losses}

    def step(self, carry: FedFomoCarry, batch: Batch, *, stage: Stage) -> FedFomoCarry:
        if stage.name == TRAIN:
            return super().step(carry, batch, stage=stage)
        compared = (carry["received"], *candidates(carry))
        losses = torch.stack([self.task.losses(model, batch)[0].double() for model in compared])
        # Sums, since only the end of the stage knows the number of examples.
        return {**carry, "losses": carry["losses"] + batch.without_padding(losses).sum(dim=1)}

    def finish(self, state: ModelState, carry: FedFomoCarry, ctx: Context) -> Finished:
        before = carry["received"]
        losses = carry["losses"] / ctx.work[COMPARE].num_examples
        moves = [tree.sub(model, before) for model in candidates(carry)]
        lengths = torch.tensor([tree.norm(move) for move in moves], dtype=torch.float64).to(losses.device)
        gains = torch.where(lengths > 0, (losses[0] - losses[1:]) / lengths.clamp(min=1e-30), 0.0)
        useful = gains.clamp(min=0.0)
        params = before
        for weight, move in zip((useful / useful.sum().clamp(min=1e-30)).tolist(), moves, strict=True):
            params = tree.add(params, move, weight)
        packet, _ = Dense().encode({"gains": gains[1:].float()}, {}, ctx.generator)
        metrics = self.train_loss(carry, ctx, TRAIN)
        return Finished({"params": params}, {"model": params, "gains": packet}, metrics=metrics)

    def init_server(self, params: Tree) -> FedFomoServer:
        return {"models": {}}

    def init_server_memory(self, client: Traits, params: Tree) -> FedFomoMemory:
        return {"affinity": torch.zeros(0, dtype=torch.float64), "sent": torch.zeros(0, dtype=torch.bool)}

    def model(self, server: FedFomoServer) -> Tree:
        return {}

    def personal_message(self, server: FedFomoServer, server_memory: FedFomoMemory, ctx: Context) -> Reply:
        affinity, sent = server_memory["affinity"], torch.zeros(ctx.num_clients, dtype=torch.bool)
        if not len(affinity):
            affinity = torch.zeros(ctx.num_clients, dtype=torch.float64)
        others = [int(client) for client in server["models"] if int(client) != ctx.traits.id]
        chosen = sorted(self.choose(others, affinity.tolist(), ctx))
        sent[chosen] = True
        message = {f"candidate {place}": server["models"][str(client)].open() for place, client in enumerate(chosen)}
        return Reply(message, {"affinity": affinity, "sent": sent})

    def choose(self, others: Sequence[int], affinity: Sequence[float], ctx: Context) -> list[int]:
        """Choose at most M of `others`, each time the one of largest affinity, or with chance epsilon_t any one."""
        left = sorted(others, key=lambda client: (-affinity[client], client))
        epsilon = max(0.0, self.hyper.epsilon - self.hyper.epsilon_decay * ctx.round)
        chosen: list[int] = []
        while left and len(chosen) < (self.hyper.num_candidates or DEFAULT_CANDIDATES):
            at_random = epsilon > 0 and ctx.generator.random() < epsilon
            chosen.append(left.pop(int(ctx.generator.integers(len(left))) if at_random else 0))
        return chosen

    def store_uplink(self, server_memory: FedFomoMemory, message: Message, ctx: Context) -> FedFomoMemory:
        affinity = server_memory["affinity"].clone()
        affinity[server_memory["sent"]] += message["gains"].decode()["gains"]
        return {**server_memory, "affinity": affinity}

    def update(self, server: FedFomoServer, received: Received, ctx: Context) -> FedFomoServer:
        arrived = {str(client): cast(Handle, handle) for client, handle in received["model"].items.items()}
        return {"models": {**server["models"], **arrived}}


def candidates(carry: FedFomoCarry) -> list[Tree]:
    """The freshly trained model, then those of others, in the order of their clients."""
    others = carry["others"]
    return [carry["params"], *(others[f"candidate {place}"] for place in range(len(others)))]
