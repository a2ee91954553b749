"""HeteroFL: Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR 2021, Algorithm 1.

A client of ratio r holds the first ceil(r n) of the n channels or units of every hidden layer, of the residual stream
and of each attention head; inputs and classes stay whole. The server averages each entry over the clients that held it.

- Scaler: in training the outputs of hidden convolutions, linear layers and embeddings are divided by r, as in the
  paper, here by dividing their weights and biases in the forward pass. Before a norm this only changes its epsilon.
- Masked cross-entropy: the logits of classes that a client has no examples of are set to 0 in training. As in the
  authors' code, the client does not count as a holder of the rows of the last layer for these classes. It says which
  classes it has, in one bit each.
- The paper computes the statistics of batch norm once after training. Ours takes group or layer norm; of a group norm
  with G groups a multiple of G channels is kept.
- Uniform weights as in the authors' code; the paper's text has no others.
- `dynamic_ratios`: each client draws its ratio anew in every round (the paper's dynamic mode).
"""

import numpy as np
import torch

from rayfl.compress.base import Buffers
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Message,
    Plan,
    RayflError,
    Stage,
    State,
    Tree,
)
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.methods.shared.sub_models import DrawnRatios, SubModels
from rayfl.tasks.supervised import Classification
from rayfl.tree import Index

LABELS = "labels"
"""The stage in which a client looks which classes it has."""


class HeteroFLHyper(DrawnRatios):
    """Hyper-parameters of HeteroFL."""

    scaler: bool = Field(default=True, description="divide the outputs of hidden layers by the ratio in training")
    masked_loss: bool | None = Field(
        default=None,
        description="set the logits of classes that a client lacks to 0 in training (left out: where examples have one "
        "class, and the model ends with a linear layer)",
    )


class HeteroFLCarry(LocalCarry):
    """A client's carry."""

    ratio: torch.Tensor  # r, float32 []
    present: torch.Tensor  # whether the client has examples of a class, bool [num_classes]; [0] without the mask


class HeteroFL(SubModels):
    """Prefix slices, elementwise means."""

    hyper: HeteroFLHyper
    paper = "Diao et al., ICLR 2021"
    capabilities = Capabilities(on_device=True, takes_stale=True, own_retention=("dynamic_ratios",))

    @property
    def masks_loss(self) -> bool:
        """Whether logits of absent classes are masked."""
        if self.hyper.masked_loss is None:
            return isinstance(self.sub_models.task, Classification) and bool(self.sub_models.head)
        return self.hyper.masked_loss

    def check_model(self, params: Tree) -> None:
        super().check_model(params)
        if self.masks_loss and not (isinstance(self.sub_models.task, Classification) and self.sub_models.head):
            raise RayflError(
                "method.masked_loss=true masks the logits of classes, and the task is no classification, or the model "
                "does not end with a linear layer; set it to false"
            )
        if self.hyper.scaler and (shared := sorted(self.sub_models.hidden & self.sub_models.tied)):
            raise RayflError(
                f"method.scaler=true divides the outputs of hidden layers, and {shared[0]!r} is also the weight of "
                "another layer; set it to false"
            )

    def plan(self, round_number: int, coin: float) -> Plan:
        plan = super().plan(round_number, coin)
        if not self.masks_loss:
            return plan
        return Plan(stages=(Stage(LABELS, epochs=1, batch_size=1000, free=True), *plan.stages))

    def begin(self, state: State, received: Message, ctx: Context) -> HeteroFLCarry:
        num_classes = ctx.initial[f"{self.sub_models.head}.weight"].shape[0] if self.masks_loss else 0
        carry = super().begin(state, received, ctx)
        present = next(iter(carry["params"].values())).new_zeros(num_classes, dtype=torch.bool)
        return {**carry, "ratio": torch.tensor(self.ratio(ctx)), "present": present}

    def step(self, carry: HeteroFLCarry, batch: Batch, *, stage: Stage) -> HeteroFLCarry:
        if stage.name == LABELS:
            present = carry["present"]
            classes = batch.labels == torch.arange(len(present), device=present.device)[:, None]
            return {**carry, "present": present | (batch.without_padding(classes.float()) > 0).any(dim=1)}

        def objective(params: Tree, batch: Batch) -> torch.Tensor:
            if self.hyper.scaler:
                params = {n: p / carry["ratio"] if n in self.sub_models.hidden else p for n, p in params.items()}
            outputs = self.task.outputs(params, batch)
            if self.masks_loss:
                outputs = torch.where(carry["present"], outputs, 0.0)
            return self.sub_models.task.mean_loss(outputs, batch.labels, batch.weights)

        loss, gradient = self.task.value_and_grad(carry["params"], batch, objective)
        return self.descend(carry, loss, gradient, stage)

    def outgoing(self, carry: HeteroFLCarry, ctx: Context) -> tuple[Tree, Index, Buffers]:
        part, index, extra = super().outgoing(carry, ctx)
        if not self.masks_loss:
            return part, index, extra
        present = carry["present"].cpu().numpy()
        rows = np.flatnonzero(present)
        of_head = [
            f"{self.sub_models.head}.{name}" for name in ("weight", "bias") if f"{self.sub_models.head}.{name}" in part
        ]
        part = {**part, **{name: part[name][torch.from_numpy(rows)] for name in of_head}}
        index = {**index, **{name: (rows, *index[name][1:]) for name in of_head}}
        return part, index, {**extra, "slice/classes": np.packbits(present)}
