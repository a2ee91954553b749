"""Per-FedAvg: Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, NeurIPS 2020, Algorithm 1.

The server looks for an x from which one gradient step of size alpha on a client's own examples leads to a good model:
client i minimises F_i(w) = f_i(w - alpha grad f_i(w)). A local step, of size beta = lr, goes along the gradient of F_i
on three batches D, D' and D'':

v = grad f_i(w - alpha g(w; D); D'),   w <- w - beta (I - alpha H(w; D'')) v.

`variant` says where the Hessian-vector product comes from:
- exact: by differentiating twice, at twice the memory.
- hf (Hessian-free, the default): (g(w + d v; D'') - g(w - d v; D'')) / (2 d).
- fo (first order): it is left out, and D'' with it. That is an extragradient step.

Where the paper is silent:
- d = delta / ||v||, so that the two points lie 2 delta apart however large v is, which float32 needs.
- The average is by samples as in FedAvg (`weighting`); clients send the change by meta-training.
- A client is evaluated after one step of size alpha on its own train split, which is discarded after the evaluation;
  right after local training that step starts from the model that it trained.
- The recorded training loss is f_i at the adapted point, on D'.
- pFedMe's comparison has lr = 0.001 and alpha = 0.005, for hundreds of rounds. In 30 rounds of the demo's data (digits,
  20 clients, seed 1) own/accuracy is 0.462 with them and 0.939 with the defaults, pooled/accuracy 0.400 and 0.933.
"""

from dataclasses import replace
from typing import Literal

import torch

from rayfl.data.batches import examples_by_batch
from rayfl.methods.base import Batch, Capabilities, Context, Field, Plan, Stage, State, Tree, tree, unused_with
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining

ADAPT = "adapt"
"""The stage before an evaluation."""


class PerFedAvgHyper(LocalTraining):
    """Hyper-parameters of Per-FedAvg, with the values of pFedMe's comparison except the step sizes."""

    lr: float = Field(default=0.03, gt=0, description="step size of a local step, beta")
    default_steps = 20
    steps: int | None = Field(
        default=None, ge=1, description="local steps per round, tau (20 where epochs is not given)"
    )
    batch_size: int = Field(default=20, ge=0, description="examples of each batch, b; 0: the whole split")
    alpha: float = Field(default=0.01, gt=0, description="step size of the adaptation to a client")
    variant: Literal["hf", "fo", "exact"] = Field(
        default="hf", description="Hessian-vector product: hf, from two gradients; fo, left out; exact"
    )
    delta: float = Field(
        default=1e-3,
        gt=0,
        description="distance from w at which hf takes its two gradients",
        json_schema_extra=unused_with(variant=["fo", "exact"]),
    )
    adapt_batch_size: int = Field(
        default=0, ge=0, description="examples of the adaptation before an evaluation; 0: the whole split"
    )


class PerFedAvg(FedAvg):
    """FedAvg whose clients train the starting point of one step, and take that step before they are evaluated."""

    hyper: PerFedAvgHyper
    paper = "Fallah et al., NeurIPS 2020"
    capabilities = Capabilities(on_device=True, server_on_device=True, takes_stale=True)

    def plan(self, round_number: int, coin: float) -> Plan:
        num_batches = 2 if self.hyper.variant == "fo" else 3
        return Plan(stages=(replace(self.hyper.stage(round_number), batches_per_step=num_batches),))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        if self.hyper.variant == "fo":
            return 1.0
        # One for an example of D and of D'; for one of D'' two, or a Hessian-vector product.
        work, sizes = ctx.work[stage.name], {"batch_size": stage.batch_size, "batches_per_step": 3}
        curved = examples_by_batch(ctx.traits.num_examples, work.num_steps, **sizes)[2]
        return 1.0 + curved / work.num_examples

    def step(self, carry: LocalCarry, batch: Batch | tuple[Batch, ...], *, stage: Stage) -> LocalCarry:
        params, alpha = carry["params"], self.hyper.alpha
        if isinstance(batch, Batch):
            assert stage.name == ADAPT
            return {**carry, "params": tree.add(params, self.task.grad(params, batch), -alpha)}
        inner, outer, *curved = batch
        adapted = tree.add(params, self.task.grad(params, inner), -alpha)
        loss, gradient = self.task.value_and_grad(adapted, outer)
        if curved:
            gradient = tree.add(gradient, self.hessian_product(params, gradient, curved[0]), -alpha)
        return self.descend(carry, loss, gradient, stage)

    def hessian_product(self, params: Tree, vector: Tree, batch: Batch) -> Tree:
        """The Hessian of the loss on `batch` at `params` times `vector`."""
        if self.hyper.variant == "exact":
            return self.task.hvp(params, batch, vector)
        square = torch.stack([tensor.square().sum() for tensor in vector.values()]).sum()
        # A vector of zeros gets zeros: both gradients are those at w.
        step = self.hyper.delta / square.sqrt().clamp(min=1e-30)
        there, back = (
            self.task.grad({name: tensor + sign * step * vector[name] for name, tensor in params.items()}, batch)
            for sign in (1.0, -1.0)
        )
        return {name: (there[name] - back[name]) / (2 * step) for name in params}

    def eval_begin(self, state: State, model: Tree | None, carry: LocalCarry | None, ctx: Context) -> LocalCarry:
        return self.start(super().eval_begin(state, model, carry, ctx)["params"])

    def eval_stages(self, round_number: int) -> tuple[Stage, ...]:
        """The adaptation, one step on the client's own train split."""
        return (Stage(ADAPT, steps=1, batch_size=self.hyper.adapt_batch_size or None),)
