"""FedDBE: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, Eliminating Domain Bias for Federated Learning in Representation
Space, NeurIPS 2023, Algorithm 1 (domain bias eliminator, DBE) around FedAvg.

A client shifts its representations z [batch, D] by a vector u_i of its own, which takes up what is special to its data,
and the mean of its representations is kept near a common one. A step goes along the gradient of

CE(H(z + u_i)) + kappa / D sum_j 1/2 (zbar_j - zbar_g,j)^2,   zbar = (1 - mu) zbar_old + mu mean(z),

with mean(z) over the batch, no gradient through zbar_old, and zbar_old = 0 at the beginning of a round. The head H is
linear, so the personal model is the network whose head has the bias b + H u_i.

- zbar_g is fixed once: in the first round clients train without u_i and without the second term, and send the zbar that
  they end with instead of a model. Their mean, weighted as models are, over those who delivered, is zbar_g for ever.
  The authors' code asks all clients in that round. If nothing arrives, the next round does the same.
- In that round D numbers go up, as they are, and the models are dropped; in every later round zbar_g comes down with
  the model.
- u_i starts at 0 and is trained at the same rate by an optimizer of its own, without weight decay and without clipping.
- kappa = 50 and mu = 1 are the authors' for a CNN on Fashion-MNIST. With mu = 1 zbar is the mean of the batch.
- kappa = 0 and u_i = 0 would be FedAvg, one round later.
- `own/...` evaluates H(z + u_i), `pooled/...` evaluates H(z). A client that is absent, or whose upload is lost, keeps
  u_i.
- The recorded training loss has both terms.
"""

from functools import cached_property

import torch
from torch.nn import functional

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Dense,
    Download,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Received,
    Stage,
    Traits,
    Tree,
    WeightedMean,
    uncompressed,
    unused_with,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, weighed
from rayfl.methods.shared.optimizers import Optimizer
from rayfl.methods.shared.own_head import WithHead

SHIFT, MEAN = "representation shift", "representation mean"
"""The names of u_i, and of zbar and zbar_g."""


class FedDBEHyper(LocalTraining):
    """Hyper-parameters of FedDBE."""

    kappa: float = Field(default=50.0, ge=0, description="weight of the distance between mean representations, kappa")
    mu: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the batch in the running mean, mu",
        json_schema_extra=unused_with(kappa=[0]),
    )


class FedDBEState(ModelState):
    """Client state; "params" are u_i."""


class FedDBECarry(LocalCarry):
    """A client's carry."""

    shift: LocalCarry  # of u_i
    common: torch.Tensor  # zbar_g, float32 [D]
    known: torch.Tensor  # float32 []: 1 if there is a zbar_g, else 0
    mean: torch.Tensor  # zbar, float32 [D]


class FedDBEServer(ModelState):
    """Server state, beside x."""

    common: torch.Tensor  # zbar_g, float32 [D]
    known: torch.Tensor  # bool []


class FedDBE(WithHead, FedAvg):
    """Down: x, and zbar_g. Up: delta_i; in the first round zbar_i in its place. Client state: u_i."""

    hyper: FedDBEHyper
    paper = "Zhang et al., NeurIPS 2023"
    capabilities = Capabilities(on_device=True, personalized=True, may_be_silent=True)
    gather = {"delta": WeightedMean(), MEAN: WeightedMean()}
    difference = ""

    @cached_property
    def shift_optimizer(self) -> Optimizer:
        """The optimizer of u_i."""
        return self.hyper.model_copy(update={"weight_decay": 0.0}).make_optimizer()

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedDBEState:
        return {"params": {SHIFT: torch.zeros(params[self.head_names[0]].shape[1])}}

    def begin(self, state: FedDBEState, received: Message, ctx: Context) -> FedDBECarry:
        carry, shift = super().begin(state, received, ctx), state["params"]
        known = MEAN in received
        return {
            **carry,
            "shift": {**self.start(shift), "optimizer": self.shift_optimizer.init(shift)},
            "common": received[MEAN].decode()[MEAN] if known else torch.zeros_like(shift[SHIFT]),
            "known": torch.tensor(float(known)),
            "mean": torch.zeros_like(shift[SHIFT]),
        }

    def step(self, carry: FedDBECarry, batch: Batch, *, stage: Stage) -> FedDBECarry:
        shift, old, share = carry["shift"], carry["mean"], self.hyper.mu

        def objective(both: Tree, batch: Batch) -> torch.Tensor:
            features = self.features(both, batch)
            outputs = self.logits(features + both[SHIFT], both)
            number = batch.without_padding(torch.ones_like(features[:, 0])).sum()
            mean = (1 - share) * old + share * batch.without_padding(features.T).sum(dim=1) / number
            distance = (mean - carry["common"]).square().mean() / 2
            losses = functional.cross_entropy(outputs, batch.labels, reduction="none")
            # both[MEAN] is 0, and the gradient with respect to it is the new zbar.
            return batch.mean(losses) + self.hyper.kappa * carry["known"] * distance + (both[MEAN] * mean).sum()

        both = {**carry["params"], **shift["params"], MEAN: torch.zeros_like(old)}
        loss, gradient = self.task.value_and_grad(both, batch, objective)
        mean = gradient.pop(MEAN)
        shift_gradient = {SHIFT: gradient.pop(SHIFT) * carry["known"]}
        params, optimizer = self.shift_optimizer.update(shift["params"], shift_gradient, shift["optimizer"], stage.lr)
        return {
            **self.descend(carry, loss, gradient, stage),
            "shift": {**shift, "params": params, "optimizer": optimizer},
            "mean": mean,
        }

    def finish(self, state: FedDBEState, carry: FedDBECarry, ctx: Context) -> Finished:
        if carry["known"]:
            new: FedDBEState = {"params": carry["shift"]["params"]}
            return self.finished(new, {"delta": self.delta(carry)}, carry, ctx)
        message, weight = weighed(uncompressed({MEAN: {MEAN: carry["mean"]}}, ctx), self.hyper.weighting, ctx)
        return Finished(state, message, weight, self.train_loss(carry, ctx))

    def init_server(self, params: Tree) -> FedDBEServer:
        width = params[self.head_names[0]].shape[1]
        return {"params": params, "common": torch.zeros(width), "known": torch.tensor(False)}

    def download(self, server: FedDBEServer, ctx: Context) -> Download:
        if not server["known"]:
            return {"model": server["params"]}
        packet, _ = Dense().encode({MEAN: server["common"]}, {}, ctx.generator)
        return {"model": server["params"], MEAN: packet}

    def update(self, server: FedDBEServer, received: Received, ctx: Context) -> FedDBEServer:
        if received[MEAN].count:
            return {**server, "common": received[MEAN].result[MEAN], "known": torch.tensor(True)}
        return {**server, "params": received["delta"].taken_from(server["params"])}

    def eval_begin(self, state: FedDBEState, model: Tree | None, carry: FedDBECarry | None, ctx: Context) -> ModelState:
        params, shift = (model or {}, state) if carry is None else (carry["params"], carry["shift"])
        weight, bias = self.head_names
        return {"params": {**params, bias: params[bias] + params[weight] @ shift["params"][SHIFT]}}
