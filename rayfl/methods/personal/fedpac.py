"""FedPAC: Xu, Tong, Huang, Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR
2023, Algorithm 1.

The body is shared. Each client has a head of its own, which the server combines with those heads that serve the
client's classes best. A round of client i, with z the representation of an example:

1. Statistics under the received body: pi_c, the share of class c, mu_c, its mean z, and V_i = (sum_c pi_c mean_c
   ||z||^2 - sum_c pi_c^2 ||mu_c||^2) / n_i, h_i[c] = pi_c mu_c.
2. The head is trained, with the body fixed.
3. The body is trained, with the head fixed: CE + lam times the mean over all entries of (z - C_y)^2, where C_y is the
   common mean of the example's class; of a class without one, the client's mu_y.
4. The mean z of each class under the trained body.

The server averages the bodies, and C_c over the clients that sent one, weighted by their numbers of examples. Client i
of those who delivered gets the head sum_j a_j head_j, where a minimises a^T (diag(V) + D_i) a over the simplex, with
D_i[j, l] = sum_c <h_i[c] - h_j[c], h_i[c] - h_l[c]>; entries below 0.001 are set to 0 and the rest scaled to sum 1.

- Before the first C_c there is no second term in step 3. A class of which nothing arrived keeps its C_c.
- A client that is absent, or whose upload is lost, keeps its head.
- `head_epochs` = 1 and `head_lr` = 0.1 are those of the authors' code, as are lam = 1 and the bound of 0.001. Both
  trainings have the method's optimizer, each with a new state.
- The statistics say much about a client's data: the server sees the class means and all heads. Compressors, clipping
  and differential privacy are refused.
- `own/...` evaluates the global body with the client's combined head, `own_after_training/...` the body and the head
  that the client has trained. There is no global model.
- The recorded training loss is that of step 3. With `clients.work` a slow client measures a share of its examples.
"""

from dataclasses import replace
from typing import NotRequired

import numpy as np
import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Collect,
    Context,
    Dense,
    Download,
    Field,
    Finished,
    FirstDraws,
    KeptModel,
    Message,
    ModelState,
    Plan,
    Received,
    Reply,
    Stage,
    State,
    Sum,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.personal.fedproto import rows
from rayfl.methods.server.fedmgda import minimum_norm_weights
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining
from rayfl.methods.shared.own_head import AT_ONCE, WithHead

MEASURE, HEAD, TRAIN, COLLECT = "measure", "head", "train", "collect"
"""The four stages of a round."""
LEAST = 1e-3
"""Weights of heads below this are 0."""


class FedPACHyper(LocalTraining):
    """Hyper-parameters of FedPAC; those of local training are the body's."""

    lam: float = Field(default=1.0, ge=0, description="weight of the distances to the classes' means, lambda")
    head_epochs: int = Field(default=1, ge=1, description="epochs of the head")
    head_lr: float = Field(
        default=0.1, gt=0, description="learning rate of the head, which changes by round as lr does"
    )


class FedPACState(ModelState):
    """Client state; "params" are its head."""


class FedPACCarry(LocalCarry):
    """A client's carry: that of the body, and that of the head."""

    head: LocalCarry
    wanted: torch.Tensor  # C_c, float32 [C, D]
    held: torch.Tensor  # whether the class has a C_c, bool [C]
    before: (
        torch.Tensor
    )  # sums of z, numbers, and sums of ||z||^2 under the received body, by class, float32 [C, D + 2]
    after: torch.Tensor  # the same under the trained body


class FedPACServer(ModelState):
    """Server state; "params" are the body. The last three are of those who delivered last, m of them."""

    table: torch.Tensor  # rows C_c and 1, or zeros without a C_c, float32 [C, D + 1]
    heads: NotRequired[Tree]  # [m, ...]
    clients: NotRequired[torch.Tensor]  # int64 [m]
    weights: NotRequired[torch.Tensor]  # a of each client, float32 [m, m]


class FedPAC(WithHead, KeptModel):
    """Down: body, C_c, and in reply the client's head. Up: body, head, V_i and h_i, class means and numbers."""

    hyper: FedPACHyper
    paper = "Xu, Tong, Huang, ICLR 2023"
    capabilities = Capabilities(
        on_device=True, own_compression=True, personalized=True, has_global_model=False, delta_of_network=False
    )
    gather = {"delta": WeightedMean(), "head": Collect(), "statistics": Collect(), "prototypes": Sum()}

    def plan(self, round_number: int, coin: float) -> Plan:
        body = self.hyper.stage(round_number, TRAIN)
        rate = self.hyper.head_lr * (body.lr / self.hyper.lr)
        head = replace(body, name=HEAD, lr=rate, epochs=self.hyper.head_epochs, steps=None)
        passes = (Stage(name, epochs=1, batch_size=AT_ONCE) for name in (MEASURE, COLLECT))
        return Plan(stages=(next(passes), head, body, next(passes)))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return float(stage.name in (HEAD, TRAIN))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedPACState:
        return {"params": self.head_of(params)}

    def begin(self, state: FedPACState, received: Message, ctx: Context) -> FedPACCarry:
        wanted = received["prototypes"].decode()["prototypes"]
        nothing = wanted.new_zeros(len(wanted), wanted.shape[1] + 2)
        return {
            **self.start(received["model"].decode()),
            "head": self.start(state["params"]),
            "wanted": wanted,
            "held": received["prototypes"].support()["prototypes"][:, 0],
            "before": nothing,
            "after": nothing,
        }

    def step(self, carry: FedPACCarry, batch: Batch, *, stage: Stage) -> FedPACCarry:
        body, head = carry["params"], carry["head"]
        if stage.name in (MEASURE, COLLECT):
            features = self.features({**body, **head["params"]}, batch, training=False)
            counted = torch.cat([features, torch.ones_like(features[:, :1]), features.square().sum(1, True)], dim=1)
            sums = self.one_hot(batch, len(carry["wanted"])) @ counted
            if stage.name == MEASURE:
                return {**carry, "before": carry["before"] + sums}
            return {**carry, "after": carry["after"] + sums}
        if stage.name == HEAD:
            loss, gradient = self.task.value_and_grad(
                head["params"], batch, lambda head, batch: self.task.loss({**body, **head}, batch)
            )
            return {**carry, "head": self.descend(head, loss, gradient, stage)}
        class_means = means(carry["before"])
        targets = torch.where(carry["held"][:, None], carry["wanted"], class_means)

        def objective(body: Tree, batch: Batch) -> torch.Tensor:
            loss, features = self.task.loss_and_features({**body, **head["params"]}, batch)
            distances = (features - targets[batch.labels]).square().mean(dim=1)
            return loss + self.hyper.lam * carry["held"].any() * batch.mean(distances)

        loss, gradient = self.task.value_and_grad(body, batch, objective)
        return self.descend(carry, loss, gradient, stage)

    def finish(self, state: FedPACState, carry: FedPACCarry, ctx: Context) -> Finished:
        sums, numbers, squares = carry["before"][:, :-2], carry["before"][:, -2], carry["before"][:, -1]
        number = numbers.sum()
        means_by_share = sums / number
        variance = (squares.sum() / number - means_by_share.square().sum()) / number
        head = carry["head"]["params"]
        statistics, _ = Dense().encode({"variance": variance[None], "means": means_by_share}, {}, ctx.generator)
        collected = rows(carry["after"][:, :-1], carry["after"][:, -2] > 0)
        return self.finished(
            {"params": head},
            {"delta": self.delta(carry), "head": head, "statistics": statistics, **collected},
            carry,
            ctx,
            TRAIN,
        )

    def init_server(self, params: Tree) -> FedPACServer:
        num_classes, width = params[self.head_names[0]].shape
        return {"params": self.body_of(params), "table": torch.zeros(num_classes, width + 1)}

    def download(self, server: FedPACServer, ctx: Context) -> Download:
        return {"model": server["params"], **rows(server["table"][:, :-1], server["table"][:, -1] > 0)}

    def update(self, server: FedPACServer, received: Received, ctx: Context) -> FedPACServer:
        sums = received["prototypes"].sum["prototypes"]
        statistics = _trees(received, "statistics")
        heads = _trees(received, "head")
        weights = combination(
            np.array([float(message["variance"]) for message in statistics]),
            np.stack([message["means"].double().numpy().reshape(-1) for message in statistics]),
        )
        return {
            "params": received["delta"].taken_from(server["params"]),
            "table": torch.where(sums[:, -1:] > 0, sums / sums[:, -1:].clamp(min=1), server["table"]),
            "heads": {name: torch.stack([head[name] for head in heads]) for name in self.head_names},
            "clients": torch.tensor(sorted(received["head"].items)),
            "weights": torch.from_numpy(weights).float(),
        }

    def reply(self, server: FedPACServer, server_memory: State, ctx: Context) -> Reply:
        assert "clients" in server and "weights" in server and "heads" in server, "there was an update"
        row = server["weights"][int((server["clients"] == ctx.traits.id).nonzero()[0, 0])]
        head = tree.map(lambda heads: torch.tensordot(row, heads, dims=1), server["heads"])
        packet, _ = Dense().encode(head, {}, ctx.generator)
        return Reply({"head": packet}, server_memory)

    def receive_reply(self, state: FedPACState, received: Message, ctx: Context) -> FedPACState:
        return {"params": received["head"].decode()}

    def eval_begin(self, state: FedPACState, model: Tree | None, carry: FedPACCarry | None, ctx: Context) -> ModelState:
        if carry is not None:
            return {"params": {**carry["params"], **carry["head"]["params"]}}
        return {"params": {**(model or {}), **state["params"]}}


def means(sums: torch.Tensor) -> torch.Tensor:
    """The mean z of each class, float32 [C, D], from rows of sums, numbers and squares; 0 without an example."""
    return sums[:, :-2] / sums[:, -2:-1].clamp(min=1)


def combination(variances: np.ndarray, means: np.ndarray) -> np.ndarray:
    """The weights a of each client's head in those of all, float64 [m, m]: a row for each client.

    variances: V, float64 [m]. means: h, float64 [m, C D].
    """
    products = means @ means.T
    lengths = np.diag(products)
    rows_of = []
    for client, row in enumerate(products):
        distances = products - row[:, None] - row[None, :] + lengths[client]
        weights = minimum_norm_weights(np.diag(np.maximum(variances, 0)) + distances)
        weights = np.where(weights < LEAST, 0, weights)
        rows_of.append(weights / weights.sum())
    return np.array(rows_of)


def _trees(received: Received, name: str) -> list[Tree]:
    """The messages of one name, by ascending client."""
    items = received[name].items
    return [item for client in sorted(items) if isinstance(item := items[client], dict)]
