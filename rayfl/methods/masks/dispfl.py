"""Dis-PFL: Dai et al., DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized Sparse
Training, ICML 2022, Algorithms 1 and 2.

A peer keeps a share of the model's entries. It trains these entries, changes its mask, and sends its trained weights
w_j with the mask m_j under which they were trained. Then every entry of its new mask becomes the mean over the
neighbours (itself included) that have trained the entry: w <- (sum_j w_j / sum_j m_j) o m_new, 0/0 = 0.

Where paper and code differ or leave something open:
- Line 7 prints one mask for two roles. As in the authors' code the denominator has the masks of the training and the
  product the new one: with new masks below, an entry that a neighbour has just regrown would shrink towards 0.
- A round here ends with the exchange that the paper's next round begins with; all start from one model, so the
  exchange before the first round would change nothing. The result is the model trained last, the paper's w_{k,T}.
- `regrow="gradient"` is Algorithm 2: one more training batch at the trained weights, in evaluation mode. The authors'
  published scripts switch it off, which is `regrow="random"`, and differ in that masks start different.
- The gradient is masked before it is clipped (the authors clip the dense one; the paper does not clip).
- Neighbours weigh as the topology says; its default, uniform weights, is the paper's.
- "Comm" of the paper's tables is recorded as comm/busiest_received_megabytes, "FLOPS" as flops/training (which has
  the search batch only where there is a search; the authors' code counts it always).
"""

from dataclasses import replace
from typing import Literal, NotRequired

from rayfl.compress.sparse import sparse_packet
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    ElementwiseMean,
    Field,
    Finished,
    FirstDraws,
    Message,
    PeerHalf,
    Plan,
    Received,
    Stage,
    State,
    Traits,
    Tree,
    unused_with,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import NOT_EXPONENTIAL, GradientMethod, LocalCarry, LocalWork
from rayfl.models import flops

TRAIN, SEARCH = "train", "search"


class DisPFLHyper(LocalWork):
    """Hyper-parameters of Dis-PFL, with the paper's values."""

    lr: float = Field(default=0.1, gt=0, description="client learning rate, eta")
    lr_decay: float = Field(
        default=0.998,
        gt=0,
        le=1,
        description="the learning rate of round t is lr * lr_decay ** t",
        json_schema_extra=NOT_EXPONENTIAL,
    )
    epochs: int | None = Field(default=None, ge=1, description="local epochs per round (5 where steps is not given)")
    batch_size: int = Field(default=128, ge=0, description="examples per batch, b; 0: the whole split")
    weight_decay: float = Field(default=5e-4, ge=0, description="L2 penalty added to the gradient")
    density: float | None = Field(
        default=None, gt=0, le=1, description="share of the entries kept; default: clients.retention_ratio, else 0.5"
    )
    distribution: masks.Distribution = Field(default="erk", description="densities of the tensors: erk, or uniform")
    erk_power: float = Field(
        default=1.0,
        ge=0,
        description="exponent of the raw ERK densities",
        json_schema_extra=unused_with(distribution=["uniform"]),
    )
    prune: masks.Prune = Field(default="all", description="all tensors, or weights_only: biases and norms stay dense")
    different_initial: bool = Field(default=True, description="whether masks start different, or as one mask")
    anneal: float = Field(default=0.5, ge=0, le=1, description="share of the kept entries that round 0 moves, alpha_0")
    regrow: Literal["gradient", "random"] = Field(default="gradient", description="how entries come back")

    default_epochs = 5


class DisPFLState(masks.MaskedModel):
    """A peer's state: its weights and the mask of the next training."""

    trained: NotRequired[Tree]  # after the last round, the weights before the exchange


class DisPFLCarry(LocalCarry, masks.Masked):
    """A peer's carry."""

    gradient: NotRequired[Tree]  # of the search


class DisPFL(GradientMethod, PeerHalf):
    """A peer trains under its mask, moves the mask, and mixes the entries of the new one."""

    hyper: DisPFLHyper
    paper = "Dai et al., ICML 2022"
    capabilities = Capabilities(
        on_device=True,
        personalized=True,
        depends_on_num_rounds=True,
        own_compression=True,
        hands_over_trees=False,
        honours_retention=True,
        own_retention=("density",),
        takes_stale=True,
    )
    gather = {"weights": ElementwiseMean("sent")}

    def plan(self, round_number: int, coin: float) -> Plan:
        train = self.hyper.stage(round_number, TRAIN)
        if self.hyper.regrow == "random":
            return Plan(stages=(train,))
        return Plan(stages=(train, replace(train, name=SEARCH, epochs=None, steps=1)))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> DisPFLState:
        hyper, density = self.hyper, masks.kept_ratio(client, self.hyper.density, 0.5)
        density_of = masks.densities(params, density, hyper.distribution, hyper.erk_power, hyper.prune)
        generator = draws.own if hyper.different_initial else draws.common("common mask")
        mask = masks.random_mask(params, density_of, generator)
        return {"params": masks.masked(params, mask), "mask": mask}

    def trains_under(self, state: DisPFLState, stage: Stage, ctx: Context) -> Tree | None:
        return None if stage.name == SEARCH else state["mask"]

    def begin(self, state: DisPFLState, received: Message, ctx: Context) -> DisPFLCarry:
        carry: DisPFLCarry = {**self.start(state["params"]), "mask": state["mask"]}
        # The search replaces the gradient.
        return carry if self.hyper.regrow == "random" else {**carry, "gradient": state["params"]}

    def step(self, carry: DisPFLCarry, batch: Batch, *, stage: Stage) -> DisPFLCarry:
        if stage.name == SEARCH:
            return {**carry, "gradient": self.task.grad(carry["params"], batch, self.task.evaluated_loss)}
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        # An entry whose weight and gradient are 0 has no weight decay and no momentum: it stays exactly 0.
        return self.descend(carry, loss, masks.masked(gradient, carry["mask"]), stage)

    def finish(self, state: DisPFLState, carry: DisPFLCarry, ctx: Context) -> Finished:
        params, mask = carry["params"], carry["mask"]
        message = {"weights": sparse_packet(params, mask)}
        share = masks.annealed(self.hyper.anneal, ctx.round, ctx.num_rounds)

        def regrow(name: str) -> masks.Regrow:
            if "gradient" not in carry:
                return masks.at_random(ctx.generator)
            return masks.by_gradient(name, carry["gradient"][name])

        moved = {name: masks.search(name, mask[name], params[name], share, regrow(name)) for name in mask}
        new: DisPFLState = {"params": params, "mask": moved}
        if ctx.round == ctx.num_rounds - 1:
            new["trained"] = params
        trained, searched = (ctx.work[name].num_examples if name in ctx.work else 0 for name in (TRAIN, SEARCH))
        metrics = flops.training_metrics(self.task.weight_uses, mask, trained, searched)
        return Finished(new, message, 1.0, {**self.train_loss(carry, ctx, TRAIN), **metrics})

    def mix(self, state: DisPFLState, received: Received, ctx: Context) -> DisPFLState:
        average = received["weights"].result if received else state["params"]
        return {**state, "params": masks.masked(average, state["mask"])}

    def final_model(self, state: DisPFLState, server: State) -> Tree:
        return state.get("trained", state["params"])
