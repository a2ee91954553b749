"""FedRoD: Chen, Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022.

One body with two heads. The body and the generic head G are trained to treat all classes alike, whatever the client
has, and are averaged; the personal head P only corrects the generic outputs, and stays with its client. With the
representation z of an example, and n_c the client's number of examples of class c, a step goes along the gradients of

balanced softmax: CE(G z + log n_c) for body and G;   CE(stop(G z) + P stop(z)) for P.

- A class that the client lacks has log n_c = -infinity, so its row of G does not move. Equal n_c make the first loss
  the plain one. The two losses share no parameter, and both gradients are those before the step.
- P starts at 0, so that a client's first personal model is the global one; other code starts at a copy of G.
- The personal model is the network with the head G + P: after the exchange with the server's G, right after the
  training with the client's. The global model G z leaves log n_c out, and so treats all classes alike.
- A client counts its classes in its first round. A client that is absent, or whose upload is lost, keeps its P.
- Both parts are trained with the same settings, each with an optimizer state and a `clip_norm` of its own.
- The recorded training loss is the sum of both losses. Messages are FedAvg's.
- The paper's second variant, a hypernetwork that makes P, is not built.
"""

import torch
from torch.nn import functional

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Stage,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.methods.shared.own_head import COUNT, CountedCarry, CountedState, CountsClasses

PERSONAL = "personal/"
"""The beginning of the names of P where one gradient is taken of all."""


class FedRoDState(CountedState):
    """Client state."""

    head: Tree  # P


class FedRoDCarry(CountedCarry):
    """A client's carry: that of body and G, and that of P."""

    personal: LocalCarry


class FedRoD(CountsClasses, FedAvg):
    """Down: body and G. Up: their delta. Client state: P, and the numbers n_c."""

    paper = "Chen, Chao, ICLR 2022"
    capabilities = Capabilities(on_device=True, takes_stale=True, personalized=True)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedRoDState:
        return {"counts": self.no_counts(params), "head": tree.zeros_like(self.head_of(params))}

    def begin(self, state: FedRoDState, received: Message, ctx: Context) -> FedRoDCarry:
        return {**super().begin(state, received, ctx), "personal": self.start(state["head"])}

    def step(self, carry: FedRoDCarry, batch: Batch, *, stage: Stage) -> FedRoDCarry:
        if stage.name == COUNT:
            return self.counted(carry, batch)
        # Finite, as 0 times infinity is not a number: padding may have any label.
        log_counts = torch.where(carry["counts"] > 0, carry["counts"].clamp(min=1).log(), -1e30)

        def objective(both: Tree, batch: Batch) -> torch.Tensor:
            shared = {name: tensor for name, tensor in both.items() if not name.startswith(PERSONAL)}
            personal = {name: both[PERSONAL + name] for name in self.head_names}
            features = self.features(shared, batch)
            generic = self.logits(features, shared)
            personalized = generic.detach() + self.logits(features.detach(), personal)
            balanced = functional.cross_entropy(generic + log_counts, batch.labels, reduction="none")
            return batch.mean(balanced + functional.cross_entropy(personalized, batch.labels, reduction="none"))

        head = carry["personal"]
        both = {**carry["params"], **{PERSONAL + name: tensor for name, tensor in head["params"].items()}}
        loss, gradient = self.task.value_and_grad(both, batch, objective)
        head_gradient = {name: gradient.pop(PERSONAL + name) for name in self.head_names}
        return {
            **self.descend(carry, loss, gradient, stage),
            "personal": self.descend(head, loss, head_gradient, stage),
        }

    def finish(self, state: FedRoDState, carry: FedRoDCarry, ctx: Context) -> Finished:
        new: FedRoDState = {"counts": carry["counts"], "head": carry["personal"]["params"]}
        return self.finished(new, {"delta": self.delta(carry)}, carry, ctx, "train")

    def eval_begin(self, state: FedRoDState, model: Tree | None, carry: FedRoDCarry | None, ctx: Context) -> ModelState:
        shared, head = (model or {}, state["head"]) if carry is None else (carry["params"], carry["personal"]["params"])
        return {"params": {**shared, **tree.add(head, self.head_of(shared))}}
