"""FedProto: Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, Algorithm 1.

No model is sent: a client keeps its own. Its prototype c_ij of class j is the mean representation R(a) [D] of
its train examples of that class; a representation is the input of the model's head, its last linear layer. The
server averages over the clients that sent one, C_j = sum_i w_ij c_ij / sum_i w_ij. A client minimises
f_i + lam / D mean_a ||R(a) - C_{y(a)}||^2 over its examples a; the term is 0 for a class without a prototype.

- w_ij = 1, as in the authors' code, or the number of examples with `weighting="samples"`. The paper prints both factors
  together, which shrinks C_j.
- c_ij comes from one forward pass after local training, in evaluation mode; the authors' code collects it during the
  last epoch, while the model changes. With `clients.work` a slow client collects it from a share of its examples.
- Up, for every class j that the client has: w_ij c_ij and w_ij, 4 (D + 1) bytes, and a bit for each class. Down: C_j,
  4 D bytes, for every class with a prototype, and a bit for each class. In round 0 there is no prototype, and clients
  minimise f_i.
- A class of which nothing arrived keeps its C_j. A client that is absent, or whose upload is lost, keeps its model.
- `own/...` evaluates the paper's prediction argmin_j ||R(a) - C_j||, with the C_j after the round. This is the
  prediction of the client's model with another head: weights 2 C_j and biases -||C_j||^2, or -1e30 if a class has no
  prototype. That model is saved as the client's, and the server's "global" model is this head.
  `own_after_training/...` evaluates the client's own head.
- All clients have the experiment's model; in the paper only D must be the same.
"""

import torch

from rayfl.compress.masks import known_support_packet, mask_packet
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    Message,
    ModelState,
    Packet,
    Plan,
    Received,
    ServerHalf,
    Stage,
    State,
    Sum,
    Tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalTraining, OwnModel, Weighting


class FedProtoHyper(LocalTraining):
    """Hyper-parameters of FedProto."""

    weighting: Weighting = Field(default="uniform", description="weight of a client's prototype in the average")
    lam: float = Field(default=1.0, ge=0, description="weight of the distances to the prototypes, lambda")


class FedProtoCarry(LocalCarry):
    """A client's carry."""

    wanted: torch.Tensor  # C_j, float32 [num_classes, D]
    held: torch.Tensor  # whether the class has a prototype, bool [num_classes]
    found: torch.Tensor  # sums of the client's representations, and counts, by class, float32 [num_classes, D + 1]


class FedProto(OwnModel, GradientMethod, ServerHalf):
    """Client state: its model. Server state: "table" [num_classes, D + 1], rows C_j and 1, or zeros without a C_j."""

    hyper: FedProtoHyper
    paper = "Tan et al., AAAI 2022"
    capabilities = Capabilities(on_device=True, own_compression=True, needs_features=True, has_global_model=False)
    gather = {"prototypes": Sum()}

    def plan(self, round_number: int, coin: float) -> Plan:
        # The batch size limits the memory of the representations; it does not change them.
        return Plan(stages=(self.hyper.stage(round_number), Stage("collect", epochs=1, batch_size=1000)))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return float(stage.name == "train")

    def begin(self, state: ModelState, received: Message, ctx: Context) -> FedProtoCarry:
        packet = received["prototypes"]
        wanted, held = packet.decode()["prototypes"], packet.support()["prototypes"][:, 0]
        return {
            **self.start(state["params"]),
            "wanted": wanted,
            "held": held,
            "found": wanted.new_zeros(len(wanted), wanted.shape[1] + 1),
        }

    def step(self, carry: FedProtoCarry, batch: Batch, *, stage: Stage) -> FedProtoCarry:
        if stage.name == "collect":
            features = self.task.loss_and_features(carry["params"], batch, training=False)[1]
            counted = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
            classes = batch.labels == torch.arange(len(carry["found"]), device=features.device)[:, None]
            return {**carry, "found": carry["found"] + batch.without_padding(classes.float()) @ counted}

        def objective(params: Tree, batch: Batch) -> torch.Tensor:
            loss, features = self.task.loss_and_features(params, batch)
            distances = (features - carry["wanted"][batch.labels]).square().mean(dim=1) * carry["held"][batch.labels]
            return loss + self.hyper.lam * batch.mean(distances)

        loss, gradient = self.task.value_and_grad(carry["params"], batch, objective)
        return self.descend(carry, loss, gradient, stage)

    def finish(self, state: ModelState, carry: FedProtoCarry, ctx: Context) -> Finished:
        divisor = carry["found"][:, -1:].clamp(min=1) if self.hyper.weighting == "uniform" else 1
        return Finished(
            {"params": carry["params"]},
            rows(carry["found"] / divisor, carry["found"][:, -1] > 0),
            metrics=self.train_loss(carry, ctx, "train"),
        )

    def init_server(self, params: Tree) -> State:
        num_classes, width = params[f"{self.task.head}.weight"].shape
        return {"table": torch.zeros(num_classes, width + 1)}

    def download(self, server: State, ctx: Context) -> Download:
        return rows(server["table"][:, :-1], server["table"][:, -1] > 0)

    def update(self, server: State, received: Received, ctx: Context) -> State:
        sums = received["prototypes"].sum["prototypes"]
        return {"table": torch.where(sums[:, -1:] > 0, sums / sums[:, -1:].clamp(min=1), server["table"])}

    def model(self, server: State) -> Tree:
        prototypes, held = server["table"][:, :-1], server["table"][:, -1]
        return {
            f"{self.task.head}.weight": 2 * prototypes,
            f"{self.task.head}.bias": -prototypes.square().sum(dim=1) - 1e30 * (1 - held),
        }

    def eval_begin(
        self, state: ModelState, model: Tree | None, carry: FedProtoCarry | None, ctx: Context
    ) -> ModelState:
        return {"params": {**state["params"], **(model or {})} if carry is None else carry["params"]}


def rows(table: torch.Tensor, held: torch.Tensor) -> dict[str, Packet]:
    """The rows of `table` [num_classes, n] that are `held` [num_classes], and a bit for each row."""
    values = known_support_packet({"prototypes": table}, {"prototypes": held[:, None].expand(table.shape)})
    return {"prototypes": values, "classes": mask_packet({"classes": held})}
