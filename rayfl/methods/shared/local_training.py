"""Local training by minibatches, the part that most methods' clients share, and learning rates by round."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Literal, Self, TypedDict, TypeVar, cast

import torch
from pydantic import Field, model_validator
from torch.utils._pytree import tree_map

from rayfl.compress.base import device_of
from rayfl.data.transfer import repeated, to_device
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Carry,
    Context,
    Difference,
    Finished,
    FinishedStack,
    FirstDraws,
    HyperParameters,
    Message,
    Method,
    ModelState,
    Packet,
    Plan,
    RayflError,
    StackRows,
    Stage,
    State,
    Traits,
    Tree,
    Trees,
    Upload,
    Work,
    count_packet,
    tree,
    unused_with,
)
from rayfl.methods.shared.optimizers import SGD, Adam, AdamW, Nesterov, Optimizer, OptimizerName

LrSchedule = Literal["constant", "exponential", "cosine", "cosine-literal"]
NOT_EXPONENTIAL = unused_with(lr_schedule=["constant", "cosine", "cosine-literal"])


class LearningRate(HyperParameters):
    """A learning rate and how it changes from round to round, r = 0, 1, ...

    constant: lr; exponential: lr lr_decay^r, with lr_decay = 1 by default; cosine: lr (1 + cos(pi r / R)) / 2, from lr
    to almost 0; cosine-literal: twice that, from 2 lr, as Elastic Aggregation (Chen et al., CVPR 2023, section 4)
    prints it. R is `lr_rounds`, by default the experiment's rounds.
    """

    lr: float = Field(default=0.05, gt=0, description="learning rate, eta")
    lr_schedule: LrSchedule = Field(
        default="exponential",
        description="learning rate by round: constant, exponential, cosine (to 0), cosine-literal (from 2 lr to 0)",
    )
    lr_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor of exponential: the rate of round r is lr * lr_decay ** r",
        json_schema_extra=NOT_EXPONENTIAL,
    )
    lr_rounds: int | None = Field(
        default=None,
        ge=1,
        description="rounds that the cosine takes, R; by default all of the experiment",
        json_schema_extra=unused_with(lr_schedule=["constant", "exponential"]),
    )

    def rate(self, round_number: int) -> float:
        """The learning rate of round `round_number`, from 0; `for_num_rounds` must have given a cosine its length."""
        if self.lr_schedule == "constant":
            return self.lr
        if self.lr_schedule == "exponential":
            return self.lr * self.lr_decay**round_number
        assert self.lr_rounds is not None and round_number < self.lr_rounds, "see for_num_rounds"
        wave = 1 + math.cos(math.pi * round_number / self.lr_rounds)
        return self.lr * (0.5 * wave if self.lr_schedule == "cosine" else wave)

    def for_num_rounds(self, rounds: int) -> Self:
        if self.lr_schedule not in ("cosine", "cosine-literal"):
            return self
        if self.lr_rounds is None:
            return self.model_copy(update={"lr_rounds": rounds})
        if self.lr_rounds < rounds:
            raise RayflError(
                f"lr_rounds={self.lr_rounds} is below the {rounds} rounds of training, and the cosine would end before "
                "they do; leave lr_rounds out"
            )
        return self


Weighting = Literal["samples", "uniform"]
ADAM = ["adam", "adamw"]
NOT_PLAIN = ("optimizer", "momentum", "clip_norm")
"""Settings with which steps are not those of plain SGD."""


class LocalCarry(TypedDict):
    """The carry of a client in local training."""

    params: Tree
    received: Tree  # where the training began
    optimizer: State
    loss: torch.Tensor  # the sum over the steps


Update = Callable[[Tree, Tree, State, float], tuple[Tree, State]]
"""`Optimizer.update`, or `Optimizer.update_last`."""

Training = TypeVar("Training", bound=LocalCarry)
"""The carry of a method that adds to `LocalCarry`."""


class LocalWork(LearningRate):
    """Hyper-parameters of local training by minibatches."""

    default_epochs: ClassVar[int] = 1
    """Local epochs per round if neither `epochs` nor `steps` is given."""
    default_steps: ClassVar[int | None] = None
    """Local steps a round in that case, in place of epochs."""

    lr: float = Field(default=0.05, gt=0, description="client learning rate, eta_l")
    epochs: int | None = Field(
        default=None, ge=1, description="local epochs per round, E (1 where steps is not given either)"
    )
    steps: int | None = Field(default=None, ge=1, description="local steps per round, K, instead of epochs")
    batch_size: int = Field(default=32, ge=0, description="examples per batch, b; 0: the whole split")
    optimizer: OptimizerName = Field(
        default="sgd", description="client optimizer, reset every round; nesterov is sgd with Nesterov's momentum"
    )
    momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="momentum of sgd and nesterov",
        json_schema_extra=unused_with(optimizer=ADAM),
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="L2 penalty added to the gradient; adamw: decay of the weights themselves"
    )
    clip_norm: float | None = Field(default=None, gt=0, description="largest Euclidean norm of a step's gradient")

    @model_validator(mode="after")
    def _one_amount_of_work(self) -> "LocalWork":
        if self.epochs is not None and self.steps is not None:
            raise RayflError(f"={self.epochs} and steps={self.steps} are both given; give one of them", key=("epochs",))
        if self.optimizer == "nesterov" and not self.momentum:
            raise RayflError(
                "=0.0 leaves optimizer='nesterov' nothing to do; give a momentum, for example 0.9", key=("momentum",)
            )
        if self.epochs is None and self.steps is None:
            # So comparisons of experiments, and others that read the settings, see the work that is done.
            self.settle(**self.default_work())
        return self

    def default_work(self) -> dict[str, int]:
        """The local work of a round, as `epochs` or `steps`, if neither is given."""
        return {"steps": self.default_steps} if self.default_steps else {"epochs": self.default_epochs}

    def stage(self, round_number: int, name: str = "train") -> Stage:
        """The stage of round `round_number` that these settings describe."""
        size = self.batch_size or None
        return Stage(name=name, epochs=self.epochs, steps=self.steps, batch_size=size, lr=self.rate(round_number))

    def make_optimizer(self) -> Optimizer:
        """The client optimizer."""
        if self.optimizer in ("adam", "adamw"):
            return (Adam if self.optimizer == "adam" else AdamW)(weight_decay=self.weight_decay)
        kind = Nesterov if self.optimizer == "nesterov" else SGD
        return kind(momentum=self.momentum, weight_decay=self.weight_decay)


class FineTuning(LocalWork):
    """Fine-tuning before an evaluation; except for these two it has the hyper-parameters of local training."""

    ft_epochs: int | None = Field(
        default=None, ge=1, description="epochs of fine-tuning (left out: as much as a round of local training)"
    )
    ft_lr: float | None = Field(default=None, gt=0, description="learning rate of fine-tuning (left out: lr)")

    @model_validator(mode="after")
    def _as_in_training(self) -> "FineTuning":
        self.settle(ft_epochs=self.ft_epochs or self.epochs, ft_lr=self.ft_lr or self.lr)
        return self

    def fine_tuning(self) -> Stage:
        """The stage on the client's own train split."""
        stage = replace(self.stage(0, "fine-tuning"), lr=self.ft_lr or self.lr)
        return replace(stage, epochs=self.ft_epochs, steps=None) if self.ft_epochs else stage


class LocalTraining(LocalWork):
    """Hyper-parameters of methods that average trained models, as most do."""

    weighting: Weighting = Field(default="samples", description="weight of a client in the average")


class GradientMethod(Method):
    """A client that runs optimizer steps on its own examples.

    By default it starts from the received "model", else from its own model. Subclasses say what it sends
    (`finish`).
    """

    Hyper = LocalTraining
    hyper: LocalWork

    @cached_property
    def optimizer(self) -> Optimizer:
        """The clients' optimizer."""
        return self.hyper.make_optimizer()

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(round_number),))

    def begin(self, state: State, received: Message, ctx: Context) -> LocalCarry:
        if "model" in received:
            return self.start(received["model"].decode())
        if "params" not in state:
            raise KeyError(f"no model to begin with: the message has {[*received]}, and no 'model'")
        return self.start(state["params"])

    def start(self, params: Tree) -> LocalCarry:
        """The carry of a client that starts training at `params`, with a new optimizer state."""
        return {
            "params": params,
            "received": params,
            "optimizer": self.optimizer.init(params),
            "loss": torch.zeros(()),
        }

    def begin_stack(self, states: State, received: Message, ctx: Context, width: int) -> LocalCarry:
        return self.start_stack(repeated(received["model"].decode(), width))

    def start_stack(self, params: Tree) -> LocalCarry:
        """`start` for a stack of models; single numbers are the same for all."""
        width = len(next(iter(params.values())))
        return tree_map(lambda x: x if x.dim() else x.expand(width), self.start(params))

    def step(self, carry: Training, batch: Batch, *, stage: Stage) -> Training:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        along = self.direction(carry, gradient)
        # The gradient's memory may be overwritten unless a subclass or the task keeps the gradient; never under vmap.
        kept = along is not gradient or type(self).descend is not GradientMethod.descend
        if kept or not self.task.gives_gradients_away:
            return self.descend(carry, loss, along, stage)
        return self._descended(carry, loss, gradient, stage, self.optimizer.update_last)

    def direction(self, carry: Carry, gradient: Tree) -> Tree:
        """The gradient that a step goes along, from that of the loss: the same by default."""
        return gradient

    def descend(self, carry: Training, loss: torch.Tensor, gradient: Tree, stage: Stage) -> Training:
        """The carry after one optimizer step along `gradient`, clipped if the settings say so."""
        return self._descended(carry, loss, gradient, stage, self.optimizer.update)

    def _descended(self, carry: Training, loss: torch.Tensor, gradient: Tree, stage: Stage, update: Update) -> Training:
        gradient = clip(gradient, self.hyper.clip_norm)
        params, state = update(carry["params"], gradient, carry["optimizer"], stage.lr)
        return cast(Training, {**carry, "params": params, "optimizer": state, "loss": carry["loss"] + loss})

    def finished(self, state: State, message: Upload, carry: LocalCarry, ctx: Context, *stages: str) -> Finished:
        """End a round: the message, its weight in the average, and the training loss of `stages` as a metric."""
        if not isinstance(self.hyper, LocalTraining):
            raise RayflError(
                f"{type(self).__name__} averages, so its Hyper needs a weighting: derive it from LocalTraining"
            )
        message, weight = weighed(message, self.hyper.weighting, ctx)
        return Finished(state, message, weight, self.train_loss(carry, ctx, *stages))

    def train_loss(self, carry: LocalCarry, ctx: Context, *stages: str) -> dict[str, float]:
        """The mean training loss over the steps of `stages`, by default of all, as a metric."""
        return self._mean_loss(float(carry["loss"]), ctx.work, stages)

    def _mean_loss(self, loss: float, work: Mapping[str, Work], stages: tuple[str, ...]) -> dict[str, float]:
        num_steps = sum(done.num_steps for name, done in work.items() if not stages or name in stages)
        return {"train/loss": loss / num_steps} if num_steps else {}

    def finished_stack(
        self, states: State, trees: Trees, carry: LocalCarry, rows: StackRows, *stages: str
    ) -> FinishedStack:
        """`finished` for a stack."""
        losses = [
            self._mean_loss(loss, work, stages) for loss, work in zip(carry["loss"].tolist(), rows.work, strict=True)
        ]
        if cast(LocalTraining, self.hyper).weighting == "uniform":
            return FinishedStack(states, trees, [1.0] * len(losses), losses)
        return FinishedStack(
            states, trees, [*map(float, rows.num_examples)], losses, lambda row: counted(rows.num_examples[row])
        )

    def progress(self, carry: LocalCarry) -> Tree:
        """delta = received - trained, a descent direction."""
        return self.delta(carry).tree()

    def delta(self, carry: LocalCarry) -> Difference:
        """`progress` for a client that only sends it."""
        return Difference(carry["received"], carry["params"])


class OwnModel(Method):
    """A client that keeps a model of its own, at first the common one."""

    capabilities = Capabilities(personalized=True)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ModelState:
        return {"params": params}


def weighed(message: Upload, weighting: Weighting, ctx: Context) -> tuple[Upload, float]:
    """The message and its weight in an average: 1, or the number of train examples, sent along in 8 bytes."""
    if weighting == "uniform":
        return message, 1.0
    num_examples = ctx.traits.num_examples
    return {**message, **counted(num_examples)}, float(num_examples)


def counted(num_examples: int) -> dict[str, Packet]:
    """The message of how many train examples a client has."""
    return {"num_examples": count_packet("num_examples", num_examples)}


def scaled_rows(stacked: Tree, factors: Sequence[float]) -> Tree:
    """A stack with row i of every tensor times `factors[i]`."""
    column = to_device(torch.tensor(factors, dtype=torch.float32), device_of(stacked))
    return tree.mul(stacked, {name: column.view(-1, *[1] * (x.dim() - 1)) for name, x in stacked.items()})


def clip(gradient: Tree, max_norm: float | None) -> Tree:
    """The gradient scaled to at most `max_norm`; safe under vmap."""
    if max_norm is None:
        return gradient
    square = torch.stack([tensor.square().sum() for tensor in gradient.values()]).sum()
    factor = torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)
    return {name: tensor * factor for name, tensor in gradient.items()}
