"""FedSCR: Wu, Yao, Lu, Wang, FedSCR: Structure-Based Communication Reduction for Federated Learning, IEEE TPDS 2021.

Clients send the filters and channels of their update whose sum of magnitudes reaches a threshold, and keep the rest as
a residual for the next round (compress/structured.py says how scores are made). The server averages as in FedAvg.

- keep_ratio, which the paper does not have, gives every tensor the threshold that keeps about this share of its
  entries; 0.1 is that of FedPSE's comparison. `threshold` is fixed, or where adaptive each client's own:
  threshold * sigmoid(d1 divergence + d2 significance + d3 variance), as Plato has it, with
  divergence = sqrt(sum over cut tensors of ||W - x||_1 / ||W||_1) of the trained W,
  significance = sqrt(|sum of the entries sent / sum of W|), and
  variance = the mean over all earlier rounds of the variance of the senders' training losses.
  Divergence and significance are of the client's last round, known to itself; before its first one the threshold is as
  given. The client sends its loss and the server the variance, four bytes each.
- A client with a retention ratio of its own uses it instead of keep_ratio, with a dense downlink.
- Rows and columns of matrices are selected like filters and channels, and every tensor has a residual.
- The whole model goes down. `downlink="structured"` is the form that FedPSE's paper compares with, a tenth both ways:
  the server cuts its mean and its own residual as clients do, C = cut(A + mean), A <- A + mean - C, x <- x - C, and a
  client that delivered gets C at the end of its round. A client that was absent first downloads what it missed, in the
  cheapest of the three forms of shared/broadcasts.py.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NotRequired, TypedDict, cast

import numpy as np
import torch
from pydantic import Field, model_validator

from rayfl.compress.base import shapes_of
from rayfl.compress.structured import Scores, Structured, StructuredCodec
from rayfl.methods.base import (
    BoundTask,
    Capabilities,
    Collect,
    Context,
    Download,
    Finished,
    FirstDraws,
    HyperParameters,
    Message,
    ModelState,
    RayflError,
    Received,
    ServerHook,
    State,
    Traits,
    Tree,
    WeightedMean,
    scalar_packet,
    tree,
    unused_with,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.broadcasts import Broadcasting, BroadcastServer, caught_up
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining

NOT_ADAPTIVE = unused_with(adaptive=[False])


class FedSCRHyper(LocalTraining):
    """Hyper-parameters of FedSCR."""

    keep_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of each tensor's entries sent (0.1 without a threshold); or clients.retention_ratio",
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        description="smallest score that is sent, instead of keep_ratio (0.3 if raw or adaptive)",
    )
    scores: Scores = Field(
        default="normalized", description="sums of magnitudes over the tensor's largest, or raw sums"
    )
    downlink: Literal["dense", "structured"] = Field(
        default="dense", description="what the server sends: the model, or filters and channels of its change"
    )
    adaptive: bool = Field(default=False, description="each client's threshold follows its divergence and significance")
    divergence_factor: float = Field(
        default=1.0, ge=0, description="weight of the divergence, d1", json_schema_extra=NOT_ADAPTIVE
    )
    significance_factor: float = Field(
        default=1.0, ge=0, description="weight of the significance, d2", json_schema_extra=NOT_ADAPTIVE
    )
    variance_factor: float = Field(
        default=1.0, ge=0, description="weight of the mean variance of losses, d3", json_schema_extra=NOT_ADAPTIVE
    )

    @model_validator(mode="after")
    def _one_rule(self) -> "FedSCRHyper":
        if self.keep_ratio is not None and (self.threshold is not None or self.adaptive or self.scores == "raw"):
            raise RayflError(
                " chooses normalized thresholds; leave out threshold, adaptive and raw scores", key=("keep_ratio",)
            )
        # Raises RayflError for a threshold that is out of range.
        self.make_compressor()
        return self

    def make_compressor(self) -> Structured:
        """The uplink's compressor; if adaptive, at a client's first threshold. Raise RayflError if it is impossible."""
        if self.threshold is not None or self.adaptive or self.scores == "raw":
            return Structured(threshold=self.threshold, scores=self.scores)
        return Structured(keep_ratio=0.1 if self.keep_ratio is None else self.keep_ratio)


class FedSCRState(TypedDict):
    """Client state."""

    residual: Tree
    params: NotRequired[Tree]  # with a structured downlink, its copy of x
    divergence: NotRequired[torch.Tensor]  # if adaptive, that of its last round (-1: none yet)
    significance: NotRequired[torch.Tensor]


class FedSCRCarry(LocalCarry):
    """A client's carry."""

    variance: NotRequired[torch.Tensor]  # if adaptive, the variance that the server sent


class FedSCRServer(ModelState):
    """Server state, beside x: the first four with a structured downlink, the last two if adaptive."""

    residual: NotRequired[Tree]  # as of `BroadcastServer`
    touched: NotRequired[Tree]
    count: NotRequired[torch.Tensor]
    broadcasts: NotRequired[dict[str, Tree]]
    variances: NotRequired[torch.Tensor]  # their sum over the rounds
    rounds: NotRequired[torch.Tensor]


class FedSCR(Broadcasting, FedAvg):
    """FedAvg whose clients send the filters and channels above a threshold."""

    hyper: FedSCRHyper
    paper = "Wu et al., IEEE TPDS 2021"
    capabilities = Capabilities(
        on_device=True,
        keeps_parts=True,
        own_compression=True,
        honours_retention=True,
        # A structured downlink is one cut for all clients.
        own_retention=("keep_ratio", "downlink"),
    )
    gather = {"delta": WeightedMean(), "loss": Collect()}

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(task, hyper, **settings)
        # A threshold cuts no tensor to a share.
        cuts_to_share = not self.hyper.adaptive and self.hyper.make_compressor().keeping(1.0) is not None
        self.capabilities = self.capabilities.but(honours_retention=cuts_to_share)

    def compressor_of(self, client: Traits) -> Structured:
        """The compressor of a client, which may have a retention ratio of its own."""
        if not client.retention_given:
            return self.hyper.make_compressor()
        return self.hyper.make_compressor().keeping(client.retention_ratio) or self.hyper.make_compressor()

    @property
    def cuts_down(self) -> bool:
        """Whether the downlink is structured."""
        return self.hyper.downlink == "structured"

    def overrides(self, hook: ServerHook) -> bool:
        return hook != "store_uplink" and self.cuts_down

    @property
    def step_compressor(self) -> Structured:
        return self.hyper.make_compressor()

    def step_codec(self, like: Tree) -> StructuredCodec:
        return StructuredCodec(shapes_of(like))

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return super().init_server_memory(client, params) if self.cuts_down else {}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedSCRState:
        state: FedSCRState = {"residual": tree.zeros_like(params)}
        if self.cuts_down:
            state["params"] = params
        if self.hyper.adaptive:
            state["divergence"] = state["significance"] = torch.tensor(-1.0)
        return state

    def begin(self, state: FedSCRState, received: Message, ctx: Context) -> FedSCRCarry:
        params = caught_up(state["params"], received) if "params" in state else received["model"].decode()
        carry: FedSCRCarry = {**self.start(params)}
        return {**carry, "variance": received["variance"].decode()["variance"]} if self.hyper.adaptive else carry

    def finish(self, state: FedSCRState, carry: FedSCRCarry, ctx: Context) -> Finished:
        update = tree.add(state["residual"], self.progress(carry))
        compressor = self.adapted(state, carry) if self.hyper.adaptive else self.compressor_of(ctx.traits)
        packet, _ = compressor.encode(update, {}, ctx.generator)
        sent = packet.decode_beside(update)
        new: FedSCRState = {"residual": tree.sub(update, sent)}
        if self.cuts_down:
            new["params"] = carry["received"]
        finished = self.finished(new, {"delta": packet}, carry, ctx)
        if not self.hyper.adaptive:
            return finished
        loss = scalar_packet("loss", finished.metrics.get("train/loss", 0.0))
        return replace(
            finished,
            message={**(finished.message or {}), "loss": loss},
            metrics={**finished.metrics, "threshold": compressor.limit},
            state={
                **new,
                "divergence": torch.tensor(divergence(carry["params"], carry["received"])),
                "significance": torch.tensor(significance(sent, carry["params"])),
            },
        )

    def adapted(self, state: FedSCRState, carry: FedSCRCarry) -> Structured:
        """The compressor at the client's threshold in this round."""
        assert "divergence" in state and "significance" in state and "variance" in carry
        if state["divergence"] < 0:
            return self.hyper.make_compressor()
        exponent = (
            self.hyper.divergence_factor * float(state["divergence"])
            + self.hyper.significance_factor * float(state["significance"])
            + self.hyper.variance_factor * float(carry["variance"])
        )
        return self.hyper.make_compressor().model_copy(
            update={"threshold": self.hyper.make_compressor().limit / (1 + math.exp(-exponent))}
        )

    def init_server(self, params: Tree) -> FedSCRServer:
        start: FedSCRServer = {**super().init_server(params)} if self.cuts_down else {"params": params}
        if not self.hyper.adaptive:
            return start
        return {**start, "variances": torch.tensor(0.0, dtype=torch.float64), "rounds": torch.tensor(0)}

    def download(self, server: FedSCRServer, ctx: Context) -> Download:
        message = {} if self.cuts_down else super().download(server, ctx)
        if "variances" not in server or "rounds" not in server:
            return message
        mean = float(server["variances"]) / max(1, int(server["rounds"]))
        return {**message, "variance": scalar_packet("variance", mean)}

    def update(self, server: FedSCRServer, received: Received, ctx: Context) -> FedSCRServer:
        if self.cuts_down:
            step = self.broadcast(cast(BroadcastServer, server), received["delta"].result, ctx)
            after: FedSCRServer = {**server, **step}
        else:
            after = {**server, **super().update(server, received, ctx)}
        if "variances" in server and "rounds" in server:
            losses = [float(loss["loss"]) for loss in received["loss"].items.values() if isinstance(loss, dict)]
            after["variances"] = server["variances"] + float(np.var(losses))
            after["rounds"] = server["rounds"] + 1
        return after


def divergence(trained: Tree, received: Tree) -> float:
    """sqrt(sum of ||W - x||_1 / ||W||_1) over the tensors of two or more dimensions."""
    ratios = (
        _ratio(float((tensor - received[name]).double().abs().sum()), float(tensor.double().abs().sum()))
        for name, tensor in trained.items()
        if tensor.ndim >= 2
    )
    return math.sqrt(sum(ratios))


def significance(sent: Tree, trained: Tree) -> float:
    """sqrt(|sum of all entries sent / sum of all entries of W|)."""
    sums = [sum(float(tensor.double().sum()) for tensor in value.values()) for value in (sent, trained)]
    return math.sqrt(abs(_ratio(*sums)))


def _ratio(part: float, whole: float) -> float:
    """part / whole; as large as a float32 can be where only the whole is zero, so that the sigmoid is 1."""
    if whole == 0:
        return 0.0 if part == 0 else float(np.finfo(np.float32).max)
    return part / whole
