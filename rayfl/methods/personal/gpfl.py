"""GPFL: Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, GPFL: Simultaneously Learning Global and Personalized Feature
Information for Personalized Federated Learning, ICCV 2023, Algorithm 1.

The representation z of an example is changed in two ways: for the client, with a condition q_i, and for what all
clients have in common, with a condition g. A shared module, the conditional valve, does both:

CoV(z, q) = relu((gamma(q) + 1) o z + beta(q)), with gamma and beta each a linear layer, relu and a layer norm.

The conditions come from shared embeddings E_c [D] of the classes: g = mean_c E_c and q_i = sum_c pi_c E_c, with pi_c
the client's share of class c. A step goes along the gradient of

CE(H_i(CoV(z, q_i)), y) + CE(cos(CoV(z, g), E_c) over c, y) + lam ||CoV(z, g) - stop(E_y)||_F,

the last one not squared and over the batch's matrix. Body, CoV and E are averaged; the head H_i stays with its client.

- g and q_i are made of the E that the client received, and stay fixed in its round. The authors' code uses the E from
  before the download, and 0 in round 0.
- The cosines have no temperature. Norms have 1e-12 added or as their least value.
- mu is a weight decay of CoV and E, in addition to `weight_decay`.
- lam = 0.01 and mu = 0.1 are the authors' for a CNN; with ResNet-18 they have 1e-4 and 0.
- E starts normal with variance 1, and CoV as torch's layers do; all clients start with the same head.
- `own/...` evaluates H_i(CoV(z, q_i)) with q_i of the server's E, `own_after_training/...` with that of the round. A
  client that has not counted its classes yet has equal shares. There is no global model.
- With equal shares q_i = g. The embedding of a class that nobody has still moves: it is in the softmax of the cosines.
- The recorded training loss is the sum of the three terms. FLOPs and simulated time leave CoV out, a small part of
  them.
- A client that is absent, or whose upload is lost, keeps its H_i.
"""

from typing import cast

import torch
from torch.nn import functional

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Stage,
    Traits,
    Tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining
from rayfl.methods.shared.modules_beside import apply_linear, apply_norm, layer_norm, linear
from rayfl.methods.shared.own_head import COUNT, CountedCarry, CountedState, CountsClasses

GAMMA, BETA, CLASSES = "conditional valve gamma", "conditional valve beta", "class embeddings"
"""The names of CoV's two branches, and of E."""
CONDITION = "condition"
"""The name of q_i in a personal model."""


class GPFLHyper(LocalTraining):
    """Hyper-parameters of GPFL."""

    lam: float = Field(default=0.01, ge=0, description="weight of the distances to the embeddings, lambda")
    mu: float = Field(default=0.1, ge=0, description="weight decay of the valve and the embeddings, mu")


class GPFLState(CountedState):
    """Client state."""

    head: Tree  # H_i


class GPFLCarry(CountedCarry):
    """A client's carry: that of body, CoV and E, and that of the head."""

    personal: LocalCarry


class GPFL(CountsClasses, FedAvg):
    """Down: body, CoV and E. Up: their delta. Client state: H_i, and its numbers of examples by class."""

    hyper: GPFLHyper
    paper = "Zhang et al., ICCV 2023"
    capabilities = Capabilities(
        on_device=True, takes_stale=True, personalized=True, has_global_model=False, delta_of_network=False
    )

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        num_classes, width = params[self.head_names[0]].shape
        generator = draws.common("conditional valve and class embeddings")
        branches = [
            {**linear(name, width, width, generator), **layer_norm(f"{name} norm", width)} for name in (GAMMA, BETA)
        ]
        embeddings = torch.from_numpy(generator.standard_normal((num_classes, width))).float()
        return {**params, **branches[0], **branches[1], CLASSES: embeddings}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> GPFLState:
        return {"counts": self.no_counts(params), "head": self.head_of(params)}

    def begin(self, state: GPFLState, received: Message, ctx: Context) -> GPFLCarry:
        return {**super().begin(state, received, ctx), "personal": self.start(state["head"])}

    def valve(self, params: Tree, features: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """CoV(z, q) [batch, D] for features z [batch, D] and a condition q [D]."""
        gamma, beta = (
            apply_norm(params, f"{name} norm", apply_linear(params, name, condition).relu()) for name in (GAMMA, BETA)
        )
        return ((gamma + 1) * features + beta).relu()

    def step(self, carry: GPFLCarry, batch: Batch, *, stage: Stage) -> GPFLCarry:
        if stage.name == COUNT:
            return self.counted(carry, batch)
        head, embeddings = carry["personal"], carry["received"][CLASSES]
        common, condition = embeddings.mean(dim=0), condition_of(carry["counts"], embeddings)

        def objective(both: Tree, batch: Batch) -> torch.Tensor:
            features = self.features(both, batch)
            generic, classes = self.valve(both, features, common), both[CLASSES]
            cosines = functional.normalize(generic, eps=1e-12) @ functional.normalize(classes, eps=1e-12).T
            outputs = self.logits(self.valve(both, features, condition), both)
            losses = sum(
                functional.cross_entropy(scores, batch.labels, reduction="none") for scores in (outputs, cosines)
            )
            squares = (generic - classes.detach()[batch.labels]).square().sum(dim=1)
            distance = (batch.without_padding(squares).sum() + 1e-12).sqrt()
            return batch.mean(cast(torch.Tensor, losses)) + self.hyper.lam * distance

        loss, gradient = self.task.value_and_grad({**carry["params"], **head["params"]}, batch, objective)
        head_gradient = {name: gradient.pop(name) for name in self.head_names}
        mu = self.hyper.mu
        for name in gradient:
            if name.startswith((GAMMA, BETA, CLASSES)):
                gradient[name] = gradient[name] + mu * carry["params"][name]
        return {
            **self.descend(carry, loss, gradient, stage),
            "personal": self.descend(head, loss, head_gradient, stage),
        }

    def finish(self, state: GPFLState, carry: GPFLCarry, ctx: Context) -> Finished:
        new: GPFLState = {"counts": carry["counts"], "head": carry["personal"]["params"]}
        return self.finished(new, {"delta": self.delta(carry)}, carry, ctx, "train")

    def init_server(self, params: Tree) -> ModelState:
        return {"params": self.body_of(params)}

    def eval_begin(self, state: GPFLState, model: Tree | None, carry: GPFLCarry | None, ctx: Context) -> ModelState:
        if carry is not None:
            condition = condition_of(carry["counts"], carry["received"][CLASSES])
            return {"params": {**carry["params"], **carry["personal"]["params"], CONDITION: condition}}
        shared = model or {}
        return {"params": {**shared, **state["head"], CONDITION: condition_of(state["counts"], shared[CLASSES])}}

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        if CONDITION not in params:
            return super().outputs(params, batch)
        features = self.features(params, batch, training=False)
        return self.logits(self.valve(params, features, params[CONDITION]), params)


def condition_of(counts: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """q_i [D] = sum_c pi_c E_c, from counts by class [C] and E [C, D]; with equal shares if nothing was counted."""
    counts = torch.where(counts.any(), counts, torch.ones_like(counts))
    return (counts / counts.sum()) @ embeddings
