"""FjORD: Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane, FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout, NeurIPS 2021, Algorithm 1.

A client of width p_max, its retention ratio, holds the first ceil(p_max n) units of every group, as in HeteroFL. Each
of its steps draws one p uniformly from the `widths` up to p_max and trains the first ceil(p n) units alone, so that
units are ordered by importance. The server averages each entry over the clients that hold it, weighted by examples.

With `distill` a step adds the loss of the p_max sub-model, and the smaller one learns from its outputs:
CE(z_pmax, y) + (1 - a) CE(z_p, y) + a KL(softmax(z_pmax) without gradient || softmax(z_p)). The paper's a is 1.

- Momentum and weight decay act on all that the client holds, also on entries without gradient in a step; in the
  authors' code they act on the whole model.
- The authors keep statistics of batch norm for each p; ours takes group or layer norm.
- Widths that give the same sub-model, as may happen in small layers, count as one.
- In stacks (`runtime.engine = "vmap"`) a step computes the gradients of all widths and uses each client's own one. The
  simulated clock and the count of operations are those of the drawn widths.
"""

from collections.abc import Sequence
from operator import le

import torch
from pydantic import model_validator

from rayfl.compress.slices import cut
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Message,
    RayflError,
    Stage,
    State,
    Tree,
    tree,
    unused_with,
)
from rayfl.methods.shared.local_training import LocalCarry, Weighting
from rayfl.methods.shared.step_draws import choice, next_key
from rayfl.methods.shared.sub_models import SubModels, SubModelTraining
from rayfl.models.widths.slices import Sizes
from rayfl.population.distributions import Share
from rayfl.task import Objective
from rayfl.tasks.supervised import Classification


class FjORDHyper(SubModelTraining):
    """Hyper-parameters of FjORD."""

    weighting: Weighting = Field(default="samples", description="weight of a client in the average of an entry")
    widths: tuple[Share, ...] = Field(
        default=(0.2, 0.4, 0.6, 0.8, 1.0), min_length=1, description="widths p that steps draw from, P, ascending"
    )
    distill: bool = Field(default=False, description="self-distillation: the p_max sub-model teaches the drawn one")
    distill_weight: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="weight of the teacher's outputs in place of the labels, alpha",
        json_schema_extra=unused_with(distill=[False]),
    )

    @model_validator(mode="after")
    def _evaluates_its_widths(self) -> "FjORDHyper":
        if list(self.widths) != sorted(set(self.widths)):
            raise RayflError(f"={list(self.widths)} must be ascending, without repetition", key=("widths",))
        if not self.is_given("evaluated_widths"):
            self.settle(evaluated_widths=self.widths)
        return self


class FjORDCarry(LocalCarry):
    """A client's carry."""

    key: torch.Tensor  # of the next step's width, int64 []


class FjORD(SubModels):
    """Prefix slices with ordered dropout inside, elementwise means."""

    hyper: FjORDHyper
    paper = "Horvath et al., NeurIPS 2021"
    capabilities = Capabilities(on_device=True, takes_stale=True)

    def check_model(self, params: Tree) -> None:
        super().check_model(params)
        if self.hyper.distill and not isinstance(self.sub_models.task, Classification):
            raise RayflError("method.distill=true compares classes, and the task is no classification; set it to false")

    def check_ratios(self, ratios: Sequence[float], ctx: Context) -> None:
        widths = self.hyper.widths
        if unknown := [ratio for ratio in ratios if ratio not in widths]:
            raise RayflError(
                f"={unknown[0]:g} is the largest width of a client, and method.widths={list(widths)} lacks it; add it "
                "there, or change it",
                ("clients", "retention_ratio"),
            )
        super().check_ratios([*ratios, *widths], ctx)

    def begin(self, state: State, received: Message, ctx: Context) -> FjORDCarry:
        return {**super().begin(state, received, ctx), "key": torch.tensor(self.units_seed(ctx))}

    def step(self, carry: FjORDCarry, batch: Batch, *, stage: Stage) -> FjORDCarry:
        params = carry["params"]
        sizes = self.sub_models.sizes_of(params)
        narrower = self.narrower(sizes)
        chosen = choice(carry["key"], len(narrower))
        if tree.is_transformed():
            # Under vmap each client has drawn a width of its own.
            made = [self.task.value_and_grad(params, batch, self.objective(sizes, inner)) for inner in narrower]
            loss, gradient = made[0]
            for number, (other_loss, other) in enumerate(made[1:], 1):
                loss = torch.where(chosen == number, other_loss, loss)
                gradient = {name: torch.where(chosen == number, other[name], gradient[name]) for name in gradient}
        else:
            loss, gradient = self.task.value_and_grad(params, batch, self.objective(sizes, narrower[int(chosen)]))
        return {**self.descend(carry, loss, gradient, stage), "key": next_key(carry["key"])}

    def narrower(self, sizes: Sizes) -> list[Sizes]:
        """The different sub-models that a client whose groups have these sizes draws from, ascending."""
        of_widths = dict.fromkeys(self.sub_models.widths.sizes(width) for width in self.hyper.widths)
        return [inner for inner in of_widths if all(map(le, inner, sizes))]

    def objective(self, sizes: Sizes, inner: Sizes) -> Objective:
        """The loss of the sub-model `inner`, as a function of the parameters of the one of `sizes`."""

        def loss(params: Tree, batch: Batch) -> torch.Tensor:
            part = params if inner == sizes else cut(params, self.sub_models.inside(sizes, inner))
            if not self.hyper.distill:
                return self.task.loss(part, batch)
            share = self.hyper.distill_weight
            mean_loss = self.sub_models.task.mean_loss
            taught, teacher = self.task.outputs(part, batch), self.task.outputs(params, batch)
            wanted = teacher.detach().log_softmax(1)
            divergence = batch.mean((wanted.exp() * (wanted - taught.log_softmax(1))).sum(dim=1))
            hard = mean_loss(teacher, batch.labels, batch.weights)
            return hard + (1 - share) * mean_loss(taught, batch.labels, batch.weights) + share * divergence

        return loss

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        """The mean over the steps of the shares of the model's operations that the drawn sub-models need."""
        num_steps = ctx.work[stage.name].num_steps if stage.name in ctx.work else 0
        if stage.split != "train" or not num_steps:
            return 0.0
        sizes = self.sub_models.widths.sizes(self.ratio(ctx))
        shares = [self.sub_models.share(inner) for inner in self.narrower(sizes)]
        mean, key = 0.0, torch.tensor(self.units_seed(ctx))
        for _ in range(num_steps):
            mean += shares[int(choice(key, len(shares)))] / num_steps
            key = next_key(key)
        return mean + self.sub_models.share(sizes) if self.hyper.distill else mean
