"""FedCP: Zhang, Hua, Wang, Song, Xue, Ma, Guan, FedCP: Separating Feature Information for Personalized Federated
Learning via Conditional Policy, KDD 2023, Algorithm 1.

A gate splits the representation z of an example into a share m for the client's head P and the rest for the frozen
common head G: the output is P(m o z) + G((1 - m) o z). The gate reads z o v, with v the sum of the rows of P's weight
scaled to length 1:

(a, b) = relu(layer norm(W (z o v))) in two halves of D numbers,   (m, 1 - m) = softmax of each pair (a_j + noise, b_j +
noise).

Body, gate and P are trained; G and the received body are fixed in a round. A step goes along the gradient of

CE + lam MMD(z, z'),   z' under the received body,   MMD with the kernel sum_a exp(-||.||^2 / (2 a)), a = 10, 15, 20,
50,

over all pairs of the batch. Body, gate, and (P + G) / 2 in place of G are averaged.

- Noise is Gumbel's with temperature 1, in training only. The authors' code draws it in evaluations too.
- v is made of P before the round; the code draws it at random in round 0. All clients start with P = G, and while they
  are equal the gate does nothing.
- z' is computed in evaluation mode (no dropout). lam = 5 is the authors' code.
- `own/...` evaluates both heads with the v of the client's P, `pooled/...` the network with G.
- P is trained by an optimizer of its own with the same settings. The recorded training loss has both terms.
- A forward pass more makes 4/3 of FedAvg's operations; FLOPs and simulated time leave the gate out, a small part of
  them.
- A client that is absent, or whose upload is lost, keeps its P.
"""

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
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining
from rayfl.methods.shared.modules_beside import apply_linear, apply_norm, layer_norm, linear
from rayfl.methods.shared.own_head import WithHead
from rayfl.methods.shared.step_draws import first_key, next_key, uniforms

GATE, OWN = "conditional gate", "own "
"""The name of the gate, and the beginning of P's names in a personal model."""
WIDTHS = (10, 15, 20, 50)
"""The kernel's a."""


class FedCPHyper(LocalTraining):
    """Hyper-parameters of FedCP."""

    lam: float = Field(default=5.0, ge=0, description="weight of the distance between representations, lambda")


class FedCPCarry(LocalCarry):
    """A client's carry: that of body and gate, and that of P."""

    personal: LocalCarry
    generic: Tree  # G
    key: torch.Tensor  # of the next step's noise, int64 []


class FedCP(WithHead, FedAvg):
    """Down: body, gate and G. Up: their delta. Client state: P."""

    hyper: FedCPHyper
    paper = "Zhang et al., KDD 2023"
    capabilities = Capabilities(on_device=True, takes_stale=True, personalized=True, delta_of_network=False)

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 4 / 3

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        width = params[self.head_names[0]].shape[1]
        gate = linear(GATE, 2 * width, width, draws.common("conditional gate"))
        return {**params, **gate, **layer_norm(f"{GATE} norm", 2 * width)}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ModelState:
        return {"params": self.head_of(params)}

    def begin(self, state: ModelState, received: Message, ctx: Context) -> FedCPCarry:
        model = received["model"].decode()
        return {
            **self.start(self.body_of(model)),
            "personal": self.start(state["params"]),
            "generic": self.head_of(model),
            "key": first_key(ctx.generator),
        }

    def gated(self, params: Tree, features: torch.Tensor, head: Tree, noise: torch.Tensor | None) -> torch.Tensor:
        """m [batch, D], for features z [batch, D], the P of which v is made, and noise [batch, 2, D]."""
        context = functional.normalize(head[self.head_names[0]].sum(dim=0), dim=0, eps=1e-12)
        halves = apply_norm(params, f"{GATE} norm", apply_linear(params, GATE, features * context)).relu()
        pairs = halves.unflatten(1, (2, -1))
        return (pairs if noise is None else pairs + noise).softmax(dim=1)[:, 0]

    def step(self, carry: FedCPCarry, batch: Batch, *, stage: Stage) -> FedCPCarry:
        head, generic = carry["personal"], carry["generic"]
        fixed = self.features({**carry["received"], **generic}, batch, training=False)
        noise = gumbels(carry["key"], fixed.new_empty(len(fixed), 2, fixed.shape[1]))

        def objective(both: Tree, batch: Batch) -> torch.Tensor:
            features = self.features({**both, **generic}, batch)
            share = self.gated(both, features, head["received"], noise)
            outputs = self.logits(share * features, both) + self.logits((1 - share) * features, generic)
            losses = functional.cross_entropy(outputs, batch.labels, reduction="none")
            return batch.mean(losses) + self.hyper.lam * discrepancy(features, fixed, batch)

        loss, gradient = self.task.value_and_grad({**carry["params"], **head["params"]}, batch, objective)
        head_gradient = {name: gradient.pop(name) for name in self.head_names}
        return {
            **self.descend(carry, loss, gradient, stage),
            "personal": self.descend(head, loss, head_gradient, stage),
            "key": next_key(carry["key"]),
        }

    def finish(self, state: ModelState, carry: FedCPCarry, ctx: Context) -> Finished:
        head = carry["personal"]["params"]
        moved = tree.scale(tree.sub(carry["generic"], head), 0.5)
        return self.finished({"params": head}, {"delta": {**self.progress(carry), **moved}}, carry, ctx)

    def eval_begin(self, state: ModelState, model: Tree | None, carry: FedCPCarry | None, ctx: Context) -> ModelState:
        shared, head = model or {}, state["params"]
        if carry is not None:
            shared, head = {**carry["params"], **carry["generic"]}, carry["personal"]["params"]
        return {"params": {**shared, **{OWN + name: tensor for name, tensor in head.items()}}}

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        if OWN + self.head_names[0] not in params:
            return super().outputs(params, batch)
        head = {name: params[OWN + name] for name in self.head_names}
        features = self.features(params, batch, training=False)
        share = self.gated(params, features, head, None)
        return self.logits(share * features, head) + self.logits((1 - share) * features, params)


def gumbels(key: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Draws of the standard Gumbel distribution in the shape of `like`."""
    drawn = uniforms(key, {"noise": like})["noise"].clamp(min=2.0**-25)
    return -(-drawn.log()).log()


def discrepancy(first: torch.Tensor, second: torch.Tensor, batch: Batch) -> torch.Tensor:
    """MMD of two sets of representations [batch, D] of the same examples, a scalar; padding does not count."""
    weights = batch.without_padding(torch.ones_like(first[:, 0]))
    weights = weights / weights.sum()

    def mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        lengths = a.square().sum(dim=1)[:, None] + b.square().sum(dim=1)
        squares = (lengths - 2 * a @ b.T).clamp(min=0)
        kernel = torch.stack([(-squares / (2 * width)).exp() for width in WIDTHS]).sum(dim=0)
        return weights @ kernel @ weights

    return mean(first, first) + mean(second, second) - 2 * mean(first, second)
