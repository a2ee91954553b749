"""FedPSE: Personalized Sparsification with Element-wise Aggregation for Federated Learning, Algorithms 1-4.

UPS: the client trains from its base weights W_i and sends the top k of its update plus residual. EWA: the server
averages every entry over those who sent it. DPS: each client gets k entries of the average, chosen between the server's
top k and its own uplink by the correlation distance d_i = 0.5 - 0.5 cos(global, own).

- `correlation`: the paper says that other correlation functions may take the cosine's place, and names none. Pearson's
  is the cosine of the vectors less their means; Spearman's is Pearson's of their ranks, where equal entries share the
  mean of theirs, so that sizes do not count.
- `keep_optimizer`: clients keep the state of their optimizer (Adam's moments and step count, the velocity of momentum)
  from round to round, as an optimizer that is made once does; by default it begins anew, as in the other methods.

Where the paper is silent or contradicts itself:
- Sign matrices are supports (their absolute value), so that denominators cannot cancel; EWA takes the sparse updates.
- The distance is over the flattened model. Top k and the random draws are per tensor, each with that tensor's k;
  `scope="model"` takes the model as one vector in both, as Algorithm 3 is printed.
- d (k - k_in) is rounded half up; places that one side cannot fill go to the other.
- Entries count as sent if they are not zero: an update with fewer than k nonzeros is padded in the message, not in M_i.
- W_i^{r,T} is not the next base: the next round starts from W_i^{r,0} + D_i. The model evaluated is W_i^{r,T}; it is
  also the client's final model, where the client trained in the last round, and otherwise its base is.
- Where clients have retention ratios of their own, k_i is client i's: it sends Top-k_i, and gets k_i entries chosen
  between Top-k_i(G) and its own uplink. A client that comes back gets the k_i largest entries of the sum of all G that
  it missed, as many as a reply has.
- A client that is not selected keeps its residual. The paper is silent on what it gets for that round: with
  `absent="catch_up"` what Algorithm 3 gives a client whose U_i is empty, G_hat, that of all rounds that it missed in
  one sum when it is next selected; with "nothing" nothing, so that its base falls behind. Measured on Fashion-MNIST (an
  MLP, 10 clients, 60 rounds, 3 seeds; own test data after training): with a fifth of the clients per round 82.8 against
  77.8 % at lambda 0 and 85.6 against 82.5 % at 0.5; with half of them 83.0 against 81.1 % and 87.8 against 86.7 %; and
  after as many bytes both ways as "nothing" takes for its 60 rounds, still 80.3, 83.5, 82.4 and 87.3 %. At lambda 1
  every client has one class, and both are at 99.9 % and above.
- All start from the common W^0, made from the seed, so the first round downloads nothing.
The sign is ours: updates are W^{r,0} - W^{r,T}, so D_i is subtracted.
"""

import math
from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict

import numpy as np
import torch

from rayfl.compress.base import shapes_of
from rayfl.compress.sparse import Scope, SparseCodec, TopK, sparse_packet, top_k_support
from rayfl.methods.base import (
    Capabilities,
    Context,
    Delivered,
    ElementwiseMean,
    Field,
    Finished,
    FirstDraws,
    Gather,
    Message,
    Metrics,
    ModelState,
    Received,
    Reply,
    ServerHalf,
    ServerHook,
    State,
    Traits,
    Tree,
    WeightedMean,
    count_packet,
    tree,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, weighed
from rayfl.methods.shared.stored_packets import buffers, packet_of

Correlation = Literal["cosine", "pearson", "spearman"]


class FedPSEHyper(LocalWork):
    """Hyper-parameters of FedPSE; the paper's sparsity p is 1 - keep_ratio."""

    weighting: Literal["seen", "samples", "uniform"] = Field(
        default="seen",
        description="weight of a client in the average: examples seen in the round (Algorithm 1's n_i), examples held, "
        "or uniform",
    )
    keep_ratio: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="share of the entries sent each way, k/n = 1 - p; or clients.retention_ratio",
    )
    scope: Scope = Field(default="tensor", description="top k of every tensor, or of the whole model")
    aggregation: Literal["ewa", "naive"] = Field(
        default="ewa", description="element-wise average, or FedAvg's (ablation)"
    )
    absent: Literal["nothing", "catch_up"] = Field(
        default="catch_up", description="what a client gets for rounds in which it did not deliver: nothing, or G_hat"
    )
    downstream: Literal["dps", "broadcast_topk"] = Field(
        default="dps", description="personal, or the same for all (ablation)"
    )
    correlation: Correlation = Field(default="cosine", description="correlation in the distance d_i")
    keep_optimizer: bool = Field(
        default=False, description="clients keep their optimizer's state from round to round, Adam's for example"
    )

    def unused(self) -> dict[str, str]:
        plain = self.optimizer == "sgd" and not self.momentum
        why = {"keep_optimizer": "as plain SGD has no state; set optimizer or momentum"} if plain else {}
        return {**super().unused(), **why}


class FedPSEState(TypedDict):
    """Client state."""

    base: Tree  # W_i
    residual: Tree  # e_i
    trained: NotRequired[Tree]  # after the last round, W_i^{r,T}
    round: NotRequired[torch.Tensor]  # that round
    optimizer: NotRequired[State]  # with keep_optimizer, after the last round


class FedPSEServer(TypedDict):
    """Server state."""

    update: Tree  # G
    support: Tree  # M_s, the entries of G_hat = Top-k(G)
    round: torch.Tensor  # the round of G
    sum: NotRequired[Tree]  # of the G_hat of all rounds (of G, with retention ratios), if absent clients catch up


class FedPSEMemory(TypedDict):
    """The server's memory of a client."""

    uplink: Tree  # its last U_i as it came; {} before the first
    seen: NotRequired[Tree]  # the server's sum when the client last got its share


class FedPSE(GradientMethod, ServerHalf):
    """Client: W_i and e_i. Server: G, and U_i of every client."""

    hyper: FedPSEHyper
    paper = "FedPSE (personalized sparsification, element-wise aggregation)"
    capabilities = Capabilities(
        on_device=True,
        keeps_parts=True,
        takes_stale=True,
        personalized=True,
        own_compression=True,
        honours_retention=True,
        own_retention=("keep_ratio",),
        metrics_with_variance=("correlation_distance",),
    )

    def keep_ratio(self, client: Traits) -> float:
        """The share of the entries that a client sends and gets, k_i / n."""
        return masks.kept_ratio(client, None, self.hyper.keep_ratio)

    @property
    def gather(self) -> Mapping[str, Gather]:
        """EWA, or FedAvg's mean."""
        return {"update": ElementwiseMean("nonzero") if self.hyper.aggregation == "ewa" else WeightedMean()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedPSEState:
        return {"base": params, "residual": tree.zeros_like(params)}

    def begin(self, state: FedPSEState, received: Message, ctx: Context) -> LocalCarry:
        base = state["base"]
        carry = self.start(tree.sub(base, received["missed"].decode()) if received else base)
        return {**carry, "optimizer": state["optimizer"]} if "optimizer" in state else carry

    def finish(self, state: FedPSEState, carry: LocalCarry, ctx: Context) -> Finished:
        update = tree.add(self.progress(carry), state["residual"])
        top_k = TopK(keep_ratio=self.keep_ratio(ctx.traits), scope=self.hyper.scope)
        packet, _ = top_k.encode(update, {}, ctx.generator)
        residual = tree.sub(update, packet.decode_beside(update))
        state = {"base": carry["received"], "residual": residual}
        if self.hyper.keep_optimizer:
            state["optimizer"] = carry["optimizer"]
        if ctx.may_be_last:
            state["trained"], state["round"] = carry["params"], torch.tensor(ctx.round)
        num_seen = sum(work.num_examples for work in ctx.work.values())
        if self.hyper.weighting == "seen":
            message, weight = {"update": packet, "num_seen": count_packet("num_seen", num_seen)}, float(num_seen)
        else:
            message, weight = weighed({"update": packet}, self.hyper.weighting, ctx)
        return Finished(state, message, weight, self.train_loss(carry, ctx))

    def receive_reply(self, state: FedPSEState, received: Message, ctx: Context) -> FedPSEState:
        return {**state, "base": tree.sub(state["base"], received["update"].decode())}

    def eval_begin(self, state: FedPSEState, model: Tree | None, carry: LocalCarry | None, ctx: Context) -> ModelState:
        return {"params": carry["params"] if carry is not None else state["base"]}

    def final_model(self, state: FedPSEState, server: FedPSEServer) -> Tree:
        # A run that is extended continues from states with the model of a round that was the last one then.
        if "trained" in state and "round" in state and state["round"] == server["round"]:
            return state["trained"]
        return state["base"]

    def init_server(self, params: Tree) -> FedPSEServer:
        zeros = tree.zeros_like(params)
        server = self._global(zeros, -1)
        return {**server, "sum": zeros} if self.hyper.absent == "catch_up" else server

    def _global(self, dense: Tree, round_number: int) -> FedPSEServer:
        """G of a round, and M_s."""
        return {
            "update": dense,
            "support": self._top(dense, self.hyper.keep_ratio),
            "round": torch.tensor(round_number),
        }

    def _top(self, dense: Tree, keep_ratio: float) -> Tree:
        """The entries of Top-k(G) that are not zero."""
        support = top_k_support(dense, keep_ratio, self.hyper.scope)
        return {name: support[name] & (dense[name] != 0) for name in dense}

    def init_server_memory(self, client: Traits, params: Tree) -> FedPSEMemory:
        return {"uplink": {}, "seen": tree.zeros_like(params)} if self.hyper.absent == "catch_up" else {"uplink": {}}

    def model(self, server: FedPSEServer) -> Tree:
        return {}

    def personal_message(self, server: FedPSEServer, server_memory: FedPSEMemory, ctx: Context) -> Reply:
        if "sum" not in server or "seen" not in server_memory:
            return Reply({}, server_memory)
        missed = tree.sub(server["sum"], server_memory["seen"])
        support = tree.map(lambda tensor: tensor != 0, missed)
        if ctx.traits.retention_given:
            support = self._top(missed, self.keep_ratio(ctx.traits))
        if not masks.num_kept(support):
            return Reply({}, server_memory)
        return Reply({"missed": sparse_packet(missed, support)}, {**server_memory, "seen": server["sum"]})

    def overrides(self, hook: ServerHook) -> bool:
        return hook != "personal_message" or self.hyper.absent == "catch_up"

    def store_uplink(self, server_memory: FedPSEMemory, message: Message, ctx: Context) -> FedPSEMemory:
        return {**server_memory, "uplink": buffers(message["update"])}

    def uplink(self, server_memory: FedPSEMemory, like: Tree) -> Tree:
        """U_i in the shapes of `like`; zeros if nothing has come up yet."""
        stored = server_memory["uplink"]
        return packet_of(stored, SparseCodec(shapes_of(like), "fp32")).decode() if stored else tree.zeros_like(like)

    def server_update(
        self, server: FedPSEServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[FedPSEServer, Metrics]:
        after = self._global(received["update"].result or tree.zeros_like(server["update"]), ctx.round)
        if "sum" in server:
            dense, support = after["update"], after["support"]
            # Clients with ratios of their own have their own largest entries of it.
            after["sum"] = tree.add(server["sum"], dense if ctx.retention_given else masks.masked(dense, support))
        return after, {}

    def reply(self, server: FedPSEServer, server_memory: FedPSEMemory, ctx: Context) -> Reply:
        dense, support = server["update"], server["support"]
        last_uplink = self.uplink(server_memory, dense)
        if ctx.traits.retention_given:
            support = self._top(dense, self.keep_ratio(ctx.traits))
        top = {name: torch.where(support[name], dense[name], 0.0) for name in dense}
        distance = correlation_distance(top, last_uplink, self.hyper.correlation)
        if self.hyper.downstream == "dps":
            sent = tree.map(lambda update: update != 0, last_uplink)
            if self.hyper.scope == "tensor":
                support = {name: personal_support(support[name], sent[name], distance, ctx.generator) for name in dense}
            else:
                whole = personal_support(tree.vector(support), tree.vector(sent), distance, ctx.generator)
                support = tree.unvector(whole, dense)
        if "sum" in server and "seen" in server_memory:
            # The sum before this round, or with a schedule an older one: the client has missed what came between.
            grown = dense if ctx.traits.retention_given else masks.masked(dense, server["support"])
            server_memory = {**server_memory, "seen": tree.add(server_memory["seen"], grown)}
        return Reply({"update": sparse_packet(dense, support)}, server_memory, {"correlation_distance": distance})


def correlation_distance(a: Tree, b: Tree, correlation: Correlation = "cosine") -> float:
    """0.5 - 0.5 cos(a, b) in [0, 1] over the flattened trees, or with another correlation; 0.5 where it is undefined,
    as either is zero (or constant).

    In float64, and with one square root, so that equal trees are at distance 0 exactly and opposite ones at 1: the
    distance decides how an entry more or less is rounded.
    """
    a, b = tree.map(torch.Tensor.double, a), tree.map(torch.Tensor.double, b)
    if correlation != "cosine":
        a, b = ({"": centred(tree.vector(vector), correlation == "spearman")} for vector in (a, b))
    squares = tree.dot(a, a) * tree.dot(b, b)
    if squares == 0:
        return 0.5
    return min(1.0, max(0.0, 0.5 - 0.5 * tree.dot(a, b) / math.sqrt(squares)))


def centred(vector: torch.Tensor, ranked: bool) -> torch.Tensor:
    """The entries, or their ranks, less their mean; equal entries share the mean of their ranks."""
    if ranked:
        _, order, counts = torch.unique(vector, return_inverse=True, return_counts=True)
        vector = (counts.cumsum(0) - (counts - 1) / 2).double()[order]
    return vector - vector.mean()


def personal_support(
    chosen: torch.Tensor, sent: torch.Tensor, distance: float, generator: np.random.Generator
) -> torch.Tensor:
    """DPS, Algorithm 3 lines 6-14: M_s,i from `chosen` (M_s) and `sent` (M_i), boolean tensors of one shape.

    As many entries as `chosen` has. The common ones are always among them. The others are drawn uniformly: first
    floor(distance * (k - k_in) + 0.5) entries of M_i alone, or all of them if they are fewer, then the rest of M_s.
    """
    common = chosen & sent
    from_client = np.flatnonzero((sent & ~common).numpy())
    from_server = np.flatnonzero((chosen & ~common).numpy())
    quota = len(from_server)
    num_from_client = min(math.floor(distance * quota + 0.5), len(from_client))
    drawn = [
        generator.choice(from_client, num_from_client, replace=False),
        generator.choice(from_server, quota - num_from_client, replace=False),
    ]
    support = common.clone().reshape(-1)
    support[torch.from_numpy(np.concatenate(drawn))] = True
    return support.reshape(chosen.shape)
