"""Clients that train narrow models: each downloads some channels and hidden units of every layer, trains that smaller
network, and sends back its change.

The server averages every entry over the clients that held it; an entry that nobody held does not change, nor does what
the server's optimizer remembers of it. Which units a client holds follows from its retention ratio, the round and the
seed, so no state is needed at either end.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch

from rayfl.compress.base import Buffers, device_of, encode_trees, shapes_of
from rayfl.compress.dense import Dense
from rayfl.compress.slices import cut, replaced, slice_of, sliced
from rayfl.data.transfer import to_device
from rayfl.determinism.seeding import generator, torch_seed
from rayfl.errors import RayflError
from rayfl.methods.base import (
    Capabilities,
    Carry,
    Context,
    ElementwiseMean,
    Field,
    Finished,
    HyperParameters,
    KeptModel,
    Message,
    ModelState,
    Packet,
    Received,
    Reply,
    Stage,
    State,
    Tree,
    UplinkMemory,
    tree,
    unused_with,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalTraining, Weighting, weighed
from rayfl.methods.shared.narrow_task import NarrowTask, memory_bytes
from rayfl.methods.shared.optimizers import SGD, Adagrad, AdaptiveAdam, Optimizer, Yogi
from rayfl.methods.shared.server_optimizer import StepperState
from rayfl.population.distributions import Share
from rayfl.task import BoundTask, NetworkTask
from rayfl.tree import Index

DELTA = "slice"
"""The message up."""
ADAPTIVE = ["adagrad", "adam", "yogi"]


class SubModelTraining(LocalTraining):
    """Hyper-parameters of local training of sub-models, and of the server."""

    weighting: Weighting = Field(default="uniform", description="weight of a client in the average of an entry")
    server_optimizer: Literal["sgd", "adagrad", "adam", "yogi"] = Field(
        default="sgd", description="optimizer of the server, which steps along the averaged delta"
    )
    server_lr: float | None = Field(
        default=None, gt=0, description="learning rate of the server, eta_g (left out: 1 with sgd, else 0.01)"
    )
    server_momentum: float | None = Field(
        default=None, ge=0, lt=1, description="momentum of the server (left out: 0; 0.9 with adam and yogi)"
    )
    beta2: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="memory of the second moment, of adam and yogi",
        json_schema_extra=unused_with(server_optimizer=["sgd", "adagrad"]),
    )
    tau: float = Field(
        default=1e-3,
        gt=0,
        description="adaptivity of adagrad, adam and yogi: added to the root of the second moment",
        json_schema_extra=unused_with(server_optimizer=["sgd"]),
    )
    own_model: Literal["slice", "full"] = Field(
        default="slice", description="what own/... evaluates before training: the client's slice, or the full model"
    )
    evaluated_widths: tuple[Share, ...] = Field(
        default=(),
        description="ratios p at which the global model is also evaluated, as pooled/accuracy_at_width_p: its first "
        "units",
    )

    def make_server_optimizer(self) -> Optimizer:
        """The server's optimizer."""
        if self.server_optimizer == "sgd":
            return SGD(momentum=self.server_momentum or 0.0)
        default = 0.0 if self.server_optimizer == "adagrad" else 0.9
        beta1 = default if self.server_momentum is None else self.server_momentum
        if self.server_optimizer == "adagrad":
            return Adagrad(beta1=beta1, tau=self.tau)
        return (AdaptiveAdam if self.server_optimizer == "adam" else Yogi)(beta1=beta1, beta2=self.beta2, tau=self.tau)

    @property
    def server_step(self) -> float:
        """eta_g."""
        return self.server_lr or (1.0 if self.server_optimizer == "sgd" else 0.01)


class DrawnRatios(SubModelTraining):
    """The same for methods in which a client's ratio may change from round to round."""

    dynamic_ratios: tuple[Share, ...] = Field(
        default=(),
        description="ratios of which each client draws one in every round; default: clients.retention_ratio",
    )


class SubModels(GradientMethod, KeptModel):
    """Down: the client's slice of x, as "model". Up: its change, delta = received - trained, in the slice.

    Server state: x, and the optimizer's. Client state: its uplink's memory alone, in the shapes of x. A subclass says
    which units a client holds (`units`); by default the first ones of each group.
    """

    hyper: SubModelTraining
    sub_models: NarrowTask
    """The task as the constructor got it, which knows the model's widths."""
    capabilities = Capabilities(on_device=True, personalized=True, takes_stale=True, honours_retention=True)
    gather = {DELTA: ElementwiseMean("sent")}
    draws_units = False
    """Whether the units are drawn at random from a seed, which each message then carries (64 bits)."""

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        if isinstance(task, NetworkTask):
            task = self.sub_models = task if isinstance(task, NarrowTask) else NarrowTask(task)
        super().__init__(task, hyper, **settings)
        if self.hyper.own_model == "full":
            self.capabilities = self.capabilities.but(personalized=False)

    # Any: an instance of the method's own Hyper.
    @classmethod
    def unused(cls, hyper: Any) -> Mapping[str, str]:
        reason = f"as the server of {cls.__name__} sends each client the entries of its slice as they are"
        return {**super().unused(hyper), "downlink": reason}

    def check_model(self, params: Tree) -> None:
        if not self.sub_models.widths.groups:
            raise RayflError(
                f"{type(self).__name__} gives clients fewer channels and hidden units, and the model has none; take "
                "another model, for example mlp"
            )
        if fixed := sorted(self.sub_models.widths.cut - params.keys()):
            raise RayflError(
                f"{type(self).__name__} cuts the model's widths, and {fixed[0]!r} is a buffer or a part that clients "
                "keep; take GroupNorm or LayerNorm in place of BatchNorm, and remove [parts]"
            )

    def check_ratios(self, ratios: Sequence[float], ctx: Context) -> None:
        drawn = self.hyper.dynamic_ratios if isinstance(self.hyper, DrawnRatios) else ()
        for ratio in {*ratios, *drawn, *self.hyper.evaluated_widths}:
            self.sub_models.try_at(ratio)
        if ctx.uplink.init(ctx.initial).keys() - ctx.initial.keys():
            raise RayflError(
                f"={ctx.uplink.name!r} remembers more than an error of each entry, and a client of "
                f"{type(self).__name__} sends other slices in other rounds; take another uplink, for example topk",
                ("uplink",),
            )

    def ratio(self, ctx: Context) -> float:
        """The share of each group's units that the client holds in this round."""
        drawn = self.hyper.dynamic_ratios if isinstance(self.hyper, DrawnRatios) else ()
        if not drawn:
            return ctx.traits.retention_ratio
        return float(drawn[int(generator(*ctx.draws.key[:3], "retention ratio").integers(len(drawn)))])

    def units(self, ratio: float, ctx: Context) -> list[np.ndarray]:
        """The units of each group that the client of `ctx` holds in this round, in the order of its narrow network."""
        return self.sub_models.widths.first(ratio)

    def units_seed(self, ctx: Context) -> int:
        """The seed of drawn units: of this seed, round or flight, and client."""
        return torch_seed(*ctx.draws.key[:3], "units")

    def held(self, ctx: Context) -> Index:
        """The positions that the client of `ctx` holds in this round."""
        index = self.sub_models.widths.index(self.units(self.ratio(ctx), ctx))
        return {name: index[name] for name in ctx.initial}

    def _seed_buffers(self, ctx: Context) -> Buffers:
        return {"slice/seed": np.array([self.units_seed(ctx)], np.uint64)} if self.draws_units else {}

    def begin(self, state: State, received: Message, ctx: Context) -> LocalCarry:
        return self.start(to_device(slice_of(received["model"]), device_of(ctx.initial)))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        """The share of the model's operations that the client's narrow network needs."""
        if stage.split != "train":
            return 0.0
        return self.sub_models.share(self.sub_models.widths.sizes(self.ratio(ctx)))

    def finish(self, state: UplinkMemory, carry: LocalCarry, ctx: Context) -> Finished:
        packet, state = self.encoded(state, *self.outgoing(carry, ctx), ctx)
        message = {} if packet is None else {DELTA: packet}
        message, weight = weighed(message, self.hyper.weighting, ctx)
        metrics = {
            **self.train_loss(carry, ctx),
            "slice/share": tree.num_entries(carry["params"]) / tree.num_entries(ctx.initial),
            "slice/memory_bytes": float(memory_bytes(carry["params"], *_trees(carry["optimizer"]))),
        }
        return Finished(state, message, weight, metrics)

    def outgoing(self, carry: Carry, ctx: Context) -> tuple[Tree, Index, Buffers]:
        """What a client sends: a slice, its positions, and the buffers that tell them (`sliced`)."""
        return self.progress(carry), self.held(ctx), self._seed_buffers(ctx)

    def encoded(
        self, state: UplinkMemory, part: Tree, index: Index, extra: Buffers, ctx: Context
    ) -> tuple[Packet | None, UplinkMemory]:
        """The packet of the slice `part` at `index` through the wrappers and the uplink, and the client's new state.

        The uplink's memory lies in full shapes, and is read and written at the index. There is no packet if the client
        does not send.
        """
        if not ctx.sends:
            return None, state
        full = cast(dict[str, Tree], state.get("uplink", {})).get(DELTA) or ctx.uplink.init(ctx.initial)
        full = to_device(full, device_of(ctx.initial))
        trees = ctx.outgoing({DELTA: part})
        memories = {DELTA: cut(full, index)} if full else {}
        packets, memories = encode_trees(ctx.uplink, trees, memories, ctx.generator)
        packet = sliced(packets[DELTA], index, shapes_of(ctx.initial), extra)
        if not full:
            return packet, state
        return packet, {**state, "uplink": {DELTA: replaced(full, index, memories[DELTA])}}

    def init_server(self, params: Tree) -> StepperState:
        return {"params": params, "optimizer": self.hyper.make_server_optimizer().init(params)}

    def personal_message(self, server: ModelState, server_memory: State, ctx: Context) -> Reply:
        index = self.held(ctx)
        packet, _ = Dense().encode(cut(server["params"], index), {}, ctx.generator)
        return Reply(
            {"model": sliced(packet, index, shapes_of(server["params"]), self._seed_buffers(ctx))}, server_memory
        )

    def update(self, server: StepperState, received: Received, ctx: Context) -> StepperState:
        delta, weights = received[DELTA].result, received[DELTA].weights
        optimizer = self.hyper.make_server_optimizer()
        params, state = optimizer.update(server["params"], delta, server["optimizer"], self.hyper.server_step)

        def where_held(new: Tree, old: Tree) -> Tree:
            return {name: torch.where(weights[name] > 0, new[name], old[name]) for name in old}

        return {
            "params": where_held(params, server["params"]),
            "optimizer": {name: where_held(state[name], server["optimizer"][name]) for name in state},
        }

    def further_models(self, server: ModelState) -> Mapping[str, Tree]:
        widths = self.sub_models.widths
        return {
            f"width_{ratio:g}": self._slice(server["params"], widths.first(ratio))
            for ratio in self.hyper.evaluated_widths
        }

    def _slice(self, params: Tree, units: Sequence[np.ndarray]) -> Tree:
        index = self.sub_models.widths.index(units)
        return cut(params, {name: index[name] for name in params})

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> ModelState:
        if carry is not None:
            return {"params": carry["params"]}
        assert model is not None, "the server has a global model"
        if self.hyper.own_model == "full":
            return {"params": model}
        return {"params": self._slice(model, self.units(self.ratio(ctx), ctx))}


def _trees(state: State) -> list[Tree]:
    """The trees of an optimizer's state."""
    return [part for part in state.values() if isinstance(part, dict)]
