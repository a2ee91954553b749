"""kNN-Per: Marfoq, Neglia, Vidal, Kameni, Personalized Federated Learning through Local Memorization, ICML 2022.

FedAvg trains the global model; a client then adds a memory. It stores the representation z_j and the label of each of
its train examples under the global model, and predicts class c of an example with the representation z by

p(c) = lam sum_{j of the k nearest, y_j = c} w_j / sum_{j of the k nearest} w_j + (1 - lam) softmax(outputs)_c.

- w_j = exp(-||z - z_j||^2 / (D scale)) as in the authors' code, with D the size of z; `distance="euclidean"` takes
  exp(-||z - z_j|| / scale), which is the paper's with scale = 1.
- `lam` is chosen for each client by the accuracy on its validation split, among 0, 0.01, ..., 1, the smallest of the
  best: a client's own train examples are their own nearest neighbours, and say nothing about lam. Or give one `lam` for
  all clients. The validation split is set aside in both cases. The authors' script tabulates test accuracies of the
  whole grid, from which nobody may choose.
- Shares of neighbours are mixed with the softmax of the outputs, as in the paper. The script mixes them with outputs
  before the softmax by default.
- At most `capacity` examples are stored, drawn for each evaluation. Of equally near examples the one that was stored
  first counts. With fewer than k examples all of them count.
- Training and messages are FedAvg's, bit for bit, and nothing of the memory is sent. lam = 0 is FedAvg.
- `own/...` evaluates p; `pooled/...` evaluates the global model. Clients are not evaluated right after training, which
  does not change their memories' model.
- A client's saved model has its memory beside the network's weights: representations and labels of its train examples.
"""

from typing import Any, Literal

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    ModelState,
    Stage,
    State,
    Tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining
from rayfl.methods.shared.own_head import AT_ONCE, WithHead

STORE, CHOOSE = "store", "choose lam"
"""The stages before an evaluation."""
KEYS, LABELS, LAM = "memory/keys", "memory/labels", "memory/lam"
"""What a personal model has beside the network: z_j [n, D], y_j [n], and lam []."""
GRID = 101
"""The number of values of lam that are compared."""


class KNNPerHyper(LocalTraining):
    """Hyper-parameters of kNN-Per."""

    neighbours: int = Field(default=10, ge=1, description="nearest examples that count, k")
    lam: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of the neighbours, lambda (left out: chosen on the validation split)",
    )
    scale: float = Field(default=1.0, gt=0, description="distances are divided by D scale; by scale if euclidean")
    distance: Literal["squared", "euclidean"] = Field(
        default="squared", description="a neighbour's weight is exp of minus this distance"
    )
    capacity: int = Field(default=10_000, ge=1, description="most examples in a client's memory")


class KNNPerCarry(ModelState):
    """The carry of a client before an evaluation."""

    memory: Tree
    correct: torch.Tensor  # validation examples that each value of lam has right, float32 [GRID]


class KNNPer(WithHead, FedAvg):
    """FedAvg, whose clients are evaluated with a memory of their examples."""

    hyper: KNNPerHyper
    paper = "Marfoq et al., ICML 2022"
    capabilities = Capabilities(on_device=True, takes_stale=True, evaluated_after_training=False)
    splits = {"validation": 0.2}

    def eval_stages(self, round_number: int) -> tuple[Stage, ...]:
        store = Stage(STORE, epochs=1, batch_size=AT_ONCE)
        choose = Stage(CHOOSE, split="validation", epochs=1, batch_size=AT_ONCE)
        return (store, choose) if self.hyper.lam is None else (store,)

    def eval_begin(self, state: State, model: Tree | None, carry: LocalCarry | None, ctx: Context) -> KNNPerCarry:
        params = model if carry is None else carry["received"]
        assert params is not None, "kNN-Per has a global model"
        bias = params[self.head_names[1]]
        memory = {
            KEYS: bias.new_zeros(0, params[self.head_names[0]].shape[1]),
            LABELS: bias.new_zeros(0, dtype=torch.int64),
            LAM: bias.new_tensor(self.hyper.lam or 0.0),
        }
        return {"params": params, "memory": memory, "correct": bias.new_zeros(GRID)}

    # Any: the carry of a round, or that of an evaluation.
    def step(self, carry: Any, batch: Batch, *, stage: Stage) -> Any:
        if stage.name not in (STORE, CHOOSE):
            return super().step(carry, batch, stage=stage)
        params, memory = carry["params"], carry["memory"]
        features = self.features(params, batch, training=False)
        if stage.name == STORE:
            keys, labels = torch.cat([memory[KEYS], features]), torch.cat([memory[LABELS], batch.labels])
            most = self.hyper.capacity
            return {**carry, "memory": {**memory, KEYS: keys[:most], LABELS: labels[:most]}}
        softmax = self.logits(features, params).softmax(dim=1)
        near = self.shares(features, memory, softmax.shape[1])
        lams = torch.linspace(0, 1, GRID, device=near.device)[:, None, None]
        right = (lams * near + (1 - lams) * softmax).argmax(dim=2) == batch.labels
        return {**carry, "correct": carry["correct"] + right.sum(dim=1)}

    def end_stage(self, carry: Any, *, stage: Stage) -> Any:
        if (stage.name == STORE and self.hyper.lam is None) or stage.name not in (STORE, CHOOSE):
            return carry
        memory = carry["memory"]
        if stage.name == CHOOSE:
            # The first of equally good ones, and 0 without any validation example.
            memory = {**memory, LAM: carry["correct"].argmax().float() / (GRID - 1)}
        return {**carry, "params": {**carry["params"], **memory}}

    def shares(self, features: torch.Tensor, memory: Tree, num_classes: int) -> torch.Tensor:
        """Each class's share of the weight of the k nearest examples, float32 [batch, C]."""
        keys = memory[KEYS]
        distances = torch.cdist(features, keys, compute_mode="donot_use_mm_for_euclid_dist")
        if self.hyper.distance == "squared":
            distances = distances.square() / keys.shape[1]
        nearest, places = (distances / self.hyper.scale).sort(dim=1, stable=True)
        number = self.hyper.neighbours
        weights, labels = (-nearest[:, :number]).softmax(dim=1), memory[LABELS][places[:, :number]]
        # Sums of a fixed order, which scatter_add on a GPU does not have.
        of_class = labels[:, :, None] == torch.arange(num_classes, device=labels.device)
        return (weights[:, :, None] * of_class).sum(dim=1)

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        outputs = super().outputs(params, batch)
        if LAM not in params or not (lam := float(params[LAM])):
            return outputs
        near = self.shares(self.features(params, batch, training=False), params, outputs.shape[1])
        mixed = lam * near + (1 - lam) * outputs.softmax(dim=1)
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()
