"""Parts of a model that clients keep, around any method with one model: personal parameters, and buffers that training
changes.

The inner method, its server and its compressors see the shared parameters alone. The wrapper carries the rest, trains
personal parameters with the client's optimizer at the stage's rate, and averages buffers:

- `personal` parameters start at x^0, are part of a client's state, and never leave it. FedPer (Arivazhagan et al.,
  2019): the head, `order="joint"`. FedRep (Collins et al., ICML 2021): the head, `local-first`. LG-FedAvg (Liang et
  al., 2020): the body. FedBABU (Oh et al., ICLR 2022): the head, `shared-only`, with a method that fine-tunes. FedBN
  (Li et al., ICLR 2021): BatchNorm's parameters, and personal buffers.
- With `local-first` and `shared-first`, personal parameters train in a stage of their own, and both stages start with a
  new optimizer state. Fine-tuning before an evaluation trains both parts together, or the part that `finetune` names.
- `clip_norm` bounds the gradient of the shared and of the personal parameters separately.
- Averaged buffers travel beside the model, uncompressed, in messages of their own, weighted as the uploads are. Only
  floats are averaged: integers (num_batches_tracked) begin every round at their initial values, unless the client keeps
  its buffers.
- Clients of a personalized method, peers and clients that send nothing also keep their buffers, and their own models
  are evaluated with them; the global model is evaluated with the averaged ones.
- In a stage whose rate is 0, such as SCAFFOLD's control batch, nothing is trained and no buffer changes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import nn

from rayfl.methods.base import (
    Capabilities,
    Carry,
    Context,
    Delivered,
    Dense,
    Download,
    Finished,
    FirstDraws,
    HyperParameters,
    Message,
    Method,
    Metrics,
    PeerHalf,
    Plan,
    RayflError,
    Received,
    ServerHalf,
    Stage,
    State,
    Traits,
    Tree,
    WeightedMean,
    tree,
    unused_with,
)
from rayfl.methods.shared.client_task import ClientTask
from rayfl.methods.shared.local_training import clip
from rayfl.methods.shared.optimizers import SGD, Optimizer
from rayfl.methods.shared.wrapper import Wrapping, WrappingClients, WrappingPeers
from rayfl.models.part_names import chosen
from rayfl.task import NetworkTask

KEPT, BUFFERS = "kept parts", "mean buffers"
"""The wrapper's entry in states and carries of clients, and its entry in the server's state and in messages."""
PERSONAL = "personal parts"
"""The name of the stage that trains personal parameters, if they have a stage of their own."""
ONE_STAGE = ["joint", "shared-only"]


class Parts(HyperParameters):
    """The `[parts]` table: parts of the model that clients keep for themselves."""

    buffers: Literal["average", "personal", "frozen"] = Field(
        default="average",
        description="buffers that training changes (BatchNorm's statistics): average over clients, personal (each "
        "client keeps its own), or frozen at their initial values",
    )
    personal: tuple[str, ...] = Field(
        default=(),
        description="parameters that each client keeps: names of parameters, modules or their classes; * is a "
        "wildcard, a leading ! excludes names",
    )
    frozen: tuple[str, ...] = Field(
        default=(),
        description="parameters that nobody trains or sends, named as in personal: they keep their first values, or "
        "those of model.start",
    )
    order: Literal["joint", "local-first", "shared-first", "shared-only"] = Field(
        default="joint",
        description="joint: a step trains personal and shared parameters together; local-first, shared-first: each in "
        "a stage of its own; shared-only: only fine-tuning trains personal ones",
        json_schema_extra=unused_with(personal=[()]),
    )
    personal_epochs: int | None = Field(
        default=None,
        ge=1,
        description="epochs of the personal stage (left out: as much work as the method's)",
        json_schema_extra=unused_with(order=ONE_STAGE),
    )
    personal_steps: int | None = Field(
        default=None,
        ge=1,
        description="steps of the personal stage, instead of epochs",
        json_schema_extra=unused_with(order=ONE_STAGE),
    )

    finetune: Literal["all", "personal", "shared"] = Field(
        default="all",
        description="the parts that a method's fine-tuning before an evaluation trains",
        json_schema_extra=unused_with(personal=[()]),
    )

    def builder(self, build: Callable[[], nn.Module], model: str) -> Callable[[], nn.Module]:
        """A function that makes the module of `build` with its `frozen` parameters, which pickles if `build` does.

        model: its name in the RayflError that the function raises for a pattern that names none of its parameters.
        """
        return partial(self._with_frozen, build, model) if self.frozen else build

    def _with_frozen(self, build: Callable[[], nn.Module], model: str) -> nn.Module:
        module = build()
        for name in chosen(self.frozen, module, model, ("parts", "frozen"), "leave some to train"):
            module.get_parameter(name).requires_grad_(False)
        return module

    @model_validator(mode="after")
    def _one_amount_of_work(self) -> "Parts":
        if self.personal_epochs is not None and self.personal_steps is not None:
            raise RayflError(
                f"={self.personal_epochs} and personal_steps={self.personal_steps} are both given; give one of them",
                key=("personal_epochs",),
            )
        return self


class OwnParts(WrappingClients):
    """The client's half around `inner`, whose task has the names and initial values of what is kept."""

    hyper: Parts
    capabilities = Capabilities(on_device=True, keeps_parts=True)
    task: NetworkTask
    own_stages = (PERSONAL,)
    own_names = frozenset((KEPT, BUFFERS))

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(inner, hyper, **settings)
        network = self.task.network
        self.trains = tuple(network.personal)
        self.buffers = tuple(name for name in network.local if name not in network.personal)
        self.averaged: tuple[str, ...] = ()
        if self.hyper.buffers == "average" and inner.gather:
            self.averaged = tuple(name for name in self.buffers if network.local[name].dtype.kind == "f")
        if self.averaged and self.capabilities.sees_all:
            raise RayflError(
                "='average' sends buffers past a wrapper that must see all that clients send; give 'personal' or "
                "'frozen'",
                ("parts", "buffers"),
            )
        can = inner.capabilities
        keeps_buffers = not self.averaged or can.personalized or isinstance(inner, PeerHalf)
        trains_own = network.personal if self.hyper.order != "shared-only" else ()
        self.kept = (*trains_own, *(self.buffers if keeps_buffers else ()))
        if self.averaged:
            self.gather = {**inner.gather, BUFFERS: WeightedMean()}
        self.evaluating = [stage.name for stage in inner.eval_stages(0)]
        # A client that comes for the first time gets parts of its own by fine-tuning, otherwise in a round.
        needs_round = can.newcomer == "model" and self.kept and not self.evaluating
        keeps_own_buffers = bool(self.buffers) and self.hyper.buffers == "personal"
        self.capabilities = self.capabilities.but(
            personalized=can.personalized or bool(self.kept),
            has_global_model={*self.trains}.isdisjoint(self.kept) and not keeps_own_buffers,
            # A server's mean of buffers cannot be scaled.
            takes_stale=self.capabilities.takes_stale and not (self.averaged and isinstance(self, Wrapping)),
            newcomer="round" if needs_round else can.newcomer,
        )

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer of personal parameters: the client's."""
        return getattr(self.trainer, "make_optimizer", SGD)()

    @property
    def trainer(self) -> HyperParameters:
        """The settings of the clients' training, which only the method inside all wrappers has."""
        return self.innermost.hyper

    @property
    def start(self) -> Tree:
        """What clients keep, before round 0."""
        return tree.to_tensors(dict(self.task.network.local))

    def plan(self, round_number: int, coin: float) -> Plan:
        plan, hyper = super().plan(round_number, coin), self.hyper
        places = [place for place, stage in enumerate(plan.stages) if stage.lr and stage.split == "train"]
        if hyper.order in ONE_STAGE or not places:
            return plan
        personal_stage = replace(plan.stages[places[0]], name=PERSONAL)
        if hyper.personal_epochs or hyper.personal_steps:
            personal_stage = replace(personal_stage, epochs=hyper.personal_epochs, steps=hyper.personal_steps)
        place = places[0] if hyper.order == "local-first" else places[-1] + 1
        return replace(plan, stages=(*plan.stages[:place], personal_stage, *plan.stages[place:]))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 1.0 if stage.name == PERSONAL else super().gradients_per_example(stage, ctx)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return self._with_kept(super().init_client(client, params, draws), self.start)

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        local = {**self.start, **state.get(KEPT, {})}
        if BUFFERS in received:
            local |= received[BUFFERS].decode()
        return {**super().begin(state, received, ctx), KEPT: self._opened(local)}

    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        kept, is_evaluating = carry[KEPT], stage.name in self.evaluating
        if stage.name == PERSONAL or (is_evaluating and self.hyper.finetune == "personal"):
            personal = {name: kept["local"][name] for name in self.trains}
            task = ClientTask(
                self.task, {**carry["params"], **{n: t for n, t in kept["local"].items() if n not in personal}}
            )
            _, gradient = task.value_and_grad(personal, batch)
            return {**carry, KEPT: self._moved(kept, gradient, task, stage)}
        joint = stage.lr and (self.hyper.finetune == "all" if is_evaluating else self.hyper.order == "joint")
        task = ClientTask(self.task, kept["local"], self.trains if joint else ())
        after = self.inner.with_task(task).step(self.inside(carry), batch, stage=stage)
        if task.num_gradients > 1:
            raise RayflError(
                f"a step of {self.title} took {task.num_gradients} gradients; a method with keeps_parts=True takes "
                "one, of the client's model"
            )
        return {**after, KEPT: self._moved(kept, task.gradient, task, stage) if stage.lr else kept}

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        if stage.name == PERSONAL:
            return carry
        after = super().end_stage(carry, stage=stage)
        # What is evaluated after the last stage is the whole model.
        whole = {**after["params"], **carry[KEPT]["local"]} if stage.name in self.evaluating[-1:] else after["params"]
        return {**after, "params": whole}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        finished, local = super().finish(state, carry, ctx), carry[KEPT]["local"]
        finished = replace(finished, state=self._with_kept(finished.state, local))
        if not self.averaged or finished.message is None or not ctx.sends:
            return finished
        packet, _ = Dense().encode({name: local[name] for name in self.averaged}, {}, ctx.generator)
        return replace(finished, message={**finished.message, BUFFERS: packet})

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        local = {**self.start, **state.get(KEPT, {})}
        if model is not None:
            kept = state.get(KEPT, {})
            local |= {name: model[name] for name in local if name in model and name not in kept}
            model = {name: tensor for name, tensor in model.items() if name not in local}
        begun = super().eval_begin(state, model, carry, ctx)
        if carry is not None:
            # FedAvg-FT evaluates what the client received, not what it has trained.
            untrained = "begun" in carry[KEPT] and begun["params"] is carry.get("received")
            local = carry[KEPT]["begun" if untrained else "local"]
        if self.evaluating:
            return {**begun, KEPT: self._opened(local)}
        return {**begun, "params": {**begun["params"], **local}}

    def final_model(self, state: State, server: State) -> Tree | None:
        model = super().final_model(state, server)
        return None if model is None else {**model, **self.start, **state.get(KEPT, {})}

    def _opened(self, local: Tree) -> Carry:
        """The wrapper's part of a carry before the first step."""
        personal = {name: local[name] for name in self.trains}
        begun = {"begun": local} if self.evaluating else {}
        return {"local": local, "optimizer": self.optimizer.init(personal), **begun}

    def _moved(self, kept: Carry, gradient: Tree, task: ClientTask, stage: Stage) -> Carry:
        """The wrapper's part of a carry after a step that moved buffers, and personal parameters along `gradient`."""
        local, optimizer = {**kept["local"], **task.moved}, kept["optimizer"]
        if gradient:
            gradient = clip(gradient, getattr(self.trainer, "clip_norm", None))
            personal, optimizer = self.optimizer.update(
                {name: local[name] for name in gradient}, gradient, optimizer, stage.lr
            )
            local |= personal
        return {**kept, "local": local, "optimizer": optimizer}

    def _with_kept(self, state: State, local: Tree) -> State:
        """The inner method's state, with what the client keeps of `local`."""
        return {**state, KEPT: {name: local[name] for name in self.kept}} if self.kept else state


class OwnPartsOfClients(OwnParts, Wrapping):
    """`OwnParts` with a server; its model has the shared parameters, the initial personal ones and averaged buffers."""

    capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)

    def init_server(self, params: Tree) -> State:
        start = self.start
        return self._with_buffers(super().init_server(params), {name: start[name] for name in self.averaged})

    def model(self, server: State) -> Tree:
        shared = super().model(server)
        return {**shared, **self.start, **server.get(BUFFERS, {})} if shared else shared

    def download(self, server: State, ctx: Context) -> Download:
        buffers = {BUFFERS: Dense().encode(server[BUFFERS], {}, ctx.generator)[0]} if self.averaged else {}
        return {**super().download(server, ctx), **buffers}

    def server_update(
        self, server: State, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[State, Metrics]:
        state, metrics = super().server_update(server, received, delivered, ctx)
        return self._with_buffers(state, received[BUFFERS].result or server[BUFFERS] if self.averaged else {}), metrics

    def _with_buffers(self, state: State, buffers: Tree) -> State:
        return {**state, BUFFERS: buffers} if self.averaged else state


class OwnPartsOfPeers(OwnParts, WrappingPeers):
    """`OwnParts` among peers, who mix averaged buffers as they mix their models."""

    capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(inner, hyper, **settings)
        can = inner.capabilities
        if can.evaluated_from_mean or (self.averaged and (can.weighs_links or not can.include_self)):
            raise RayflError(
                f"method {type(inner).__name__} needs the mean of whole models, or mixes differences of them, so its "
                "peers cannot keep parts of a model; choose another method (with dpsgd_ft, ft_from='own')"
            )

    def mix(self, state: State, received: Received, ctx: Context) -> State:
        mixed, kept = super().mix(state, received, ctx), state.get(KEPT, {})
        return self._with_kept(mixed, {**kept, **(received[BUFFERS].result if BUFFERS in received else {})})


def with_parts(method: Method, parts: Parts) -> Method:
    """Wrap a method so that its clients keep `parts` of the model; the task's network has their initial values.

    Raise RayflError if the method does not train one model by one gradient per step, or exchanges nothing.
    """
    name = method.innermost.name
    if not method.capabilities.keeps_parts:
        what = "parts.personal" if parts.personal else "a model whose buffers change in training (BatchNorm)"
        cure = "" if parts.personal else ", parts.buffers='frozen', or a model with GroupNorm"
        raise RayflError(
            f"method {name!r} cannot be used with {what}: its clients train several models, take several gradients a "
            f"step, or do not say which of them is theirs (keeps_parts); use fedavg, scaffold or dpsgd{cure}"
        )
    if parts.personal and not method.gather:
        raise RayflError(
            f" does nothing, as clients of {name} exchange nothing and keep all of the model; remove it",
            ("parts", "personal"),
        )
    if parts.is_given("finetune") and not method.eval_stages(0):
        raise RayflError(
            f"={parts.finetune!r} does nothing, as {name} does not fine-tune before an evaluation; remove it, or take "
            "a method that does, such as fedavg_ft",
            ("parts", "finetune"),
        )
    return (OwnPartsOfClients if isinstance(method, ServerHalf) else OwnPartsOfPeers)(method, parts)
