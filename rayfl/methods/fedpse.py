"""FedPSE: Personalized Sparsification with Element-wise Aggregation for Federated Learning (paper 000), Algorithms 1-4.

UPS: the client trains from its base weights W_i and sends the top k of its update plus residual. EWA: the server
averages every entry over those who sent it. DPS: each client gets k entries of the average, chosen between the server's
top k and its own uplink by the correlation distance d_i = 0.5 - 0.5 cos(global, own).

Where the paper is silent or contradicts itself:
- Sign matrices are supports (their absolute value), so that denominators cannot cancel; EWA takes the sparse updates.
- top k is per tensor (`scope="model"` for the whole model); the distance is over the flattened model.
- d (k - k_in) is rounded half up; what one side cannot fill, the other side gets.
- W_i^{r,T} is not the next base: the next round starts from W_i^{r,0} + D_i. The model judged is W_i^{r,T}.
- A client that is not selected keeps its residual and gets no downlink. All start from the common W^0, made from the
  seed, so the first round downloads nothing.
The sign is ours: updates are W^{r,0} - W^{r,T}, so D_i is subtracted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.compress.scalar import count_packet
from rayfl.compress.sparse import Scope, TopK, sparse_packet, top_k_support
from rayfl.gather import Aggregate, ElementwiseMean, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics, Reply, ServerHalf, Traits
from rayfl.task import Task
from rayfl.training import GradientMethod, LocalTraining
from rayfl.tree import State, Tree


class FedPSEHyper(LocalTraining):
    """Hyper-parameters of FedPSE; the paper's sparsity p is 1 - keep_ratio."""

    keep_ratio: float = Field(0.1, gt=0, le=1, description="share of the entries sent each way, k/n = 1 - p")
    scope: Scope = Field("tensor", description="top k of every tensor, or of the whole model")
    aggregation: Literal["ewa", "naive"] = Field("ewa", description="element-wise average, or FedAvg's (ablation)")
    downstream: Literal["dps", "broadcast_topk"] = Field("dps", description="personal, or the same for all (ablation)")


class FedPSE(GradientMethod, ServerHalf):
    """Client state: base weights and residual. Link: the client's last uplink. Server: the dense average G."""

    Hyper: ClassVar[type[FedPSEHyper]] = FedPSEHyper
    hyper: FedPSEHyper
    paper: ClassVar[str] = "FedPSE (personalized sparsification, element-wise aggregation)"
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True

    # Any: hyper-parameters are whatever Hyper declares and validates.
    def __init__(self, task: Task, **hyper: Any) -> None:
        super().__init__(task, **hyper)
        self.top_k = TopK(keep_ratio=self.hyper.keep_ratio, scope=self.hyper.scope)
        rule: Gather = ElementwiseMean("nonzero") if self.hyper.aggregation == "ewa" else WeightedMean()
        self.gather = {"update": rule}

    def init_client(self, client: Traits, params: Tree, generator: np.random.Generator) -> State:
        return {"base": params, "residual": tree.zeros_like(params), "trained": params}

    def begin(self, state: State, received: Message | None, ctx: Context) -> Carry:
        return self.start(state["base"])

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        update = tree.add(self.progress(carry), state["residual"])
        packet, _ = self.top_k.encode(update, {}, ctx.generator)
        residual = tree.sub(update, packet.decode())
        num_samples = sum(work.num_examples for work in ctx.work.values())
        message = {"update": packet, "num_samples": count_packet("num_samples", num_samples)}
        state = {"base": state["base"], "residual": residual, "trained": carry["params"]}
        return Finished(state, message, float(num_samples), self.train_loss(carry, ctx))

    def absorb(self, state: State, received: Message, ctx: Context) -> State:
        return {**state, "base": tree.sub(state["base"], received["update"].decode())}

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        return {"params": carry["params"] if carry is not None else state["base"]}

    def outcome(self, state: State) -> Tree:
        return state["trained"]

    def init_server(self, params: Tree) -> State:
        return {"update": tree.zeros_like(params)}

    def init_link(self, client: Traits, params: Tree) -> State:
        return {"uplink": tree.zeros_like(params)}

    def model(self, server: State) -> Tree:
        return {}

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {}

    def remember(self, link: State, message: Message, ctx: Context) -> State:
        return {"uplink": message["update"].decode()}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        return {"update": received["update"].result or tree.zeros_like(server["update"])}, {}

    def reply(self, server: State, link: State, ctx: Context) -> Reply:
        dense, own = server["update"], link["uplink"]
        chosen = top_k_support(dense, self.hyper.keep_ratio, self.hyper.scope)
        chosen = {name: support & (dense[name] != 0) for name, support in chosen.items()}
        top = {name: torch.where(support, dense[name], 0.0) for name, support in chosen.items()}
        distance = correlation_distance(top, own)
        if self.hyper.downstream == "dps":
            chosen = personal_support(chosen, {name: u != 0 for name, u in own.items()}, distance, ctx.generator)
        return Reply({"update": sparse_packet(dense, chosen)}, link, {"correlation_distance": distance})


def correlation_distance(a: Tree, b: Tree) -> float:
    """0.5 - 0.5 cos(a, b) in [0, 1] over the flattened trees; 0.5 where either is zero."""
    norms = tree.norm(a) * tree.norm(b)
    if norms == 0:
        return 0.5
    return min(1.0, max(0.0, 0.5 - 0.5 * tree.dot(a, b) / norms))


def personal_support(chosen: Tree, own: Tree, distance: float, generator: np.random.Generator) -> Tree:
    """DPS, Algorithm 3 lines 6-14, tensor by tensor: as many entries as `chosen` has, the common ones always."""
    return {name: _personal(support, own[name], distance, generator) for name, support in chosen.items()}


def _personal(chosen: Tensor, own: Tensor, distance: float, generator: np.random.Generator) -> Tensor:
    common = chosen & own
    from_own = np.flatnonzero((own & ~common).numpy())
    from_server = np.flatnonzero((chosen & ~common).numpy())
    quota = len(from_server)
    num_own = min(int(np.floor(distance * quota + 0.5)), len(from_own))
    drawn = [
        generator.choice(from_own, num_own, replace=False),
        generator.choice(from_server, quota - num_own, replace=False),
    ]
    support = common.clone().reshape(-1)
    support[torch.from_numpy(np.concatenate(drawn))] = True
    return support.reshape(chosen.shape)
