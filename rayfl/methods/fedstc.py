"""FedSTC: Sattler, Wiedemann, Mueller, Samek, Robust and Communication-Efficient Federated Learning from Non-i.i.d.
Data, IEEE TNNLS 2019, Algorithm 2.

Client: A_i += delta_i, C_i = STC(A_i), A_i -= C_i. Server: A += mean of C_i, C = STC(A), A -= C, x -= C. STC keeps the
largest entries as signs times one magnitude (compress/ternary.py); the rest stays in the residuals, on both sides.
A client that delivered gets C at the end of its round. One that was absent for s rounds first downloads what it missed.

- Clients and server start from the common x^0, made from the seed, so round 0 begins without a download.
- The missed broadcasts (the paper's partial sum) are sent in the cheapest of three forms: the s broadcasts as they
  were, the new values of all entries that they changed, or the model. All three give the server's x to the last bit. A
  single missed broadcast is always sent as it was.
- A round in which nothing arrives broadcasts nothing and leaves the server's residual.
- keep_ratio is the same both ways, but a client with a retention ratio of its own sends that share. The paper's is
  1/400 with one local step; 0.1 is that of FedPSE's comparison.
- Means are weighted by samples as in FedAvg; the paper's are uniform.
The sign is ours: delta_i is x minus the trained model, so C is subtracted.
"""

from functools import cached_property
from typing import NotRequired, TypedDict

import numpy as np
import torch
from pydantic import Field

from rayfl import tree
from rayfl.compress.base import message_bits, shapes_of
from rayfl.compress.dense import Dense
from rayfl.compress.sparse import Scope, sparse_packet
from rayfl.compress.ternary import Ternary, TernaryCodec
from rayfl.methods.base import (
    Context,
    Finished,
    FirstDraws,
    KeptModel,
    Message,
    ModelState,
    Received,
    Reply,
    Traits,
    Tree,
    WeightedMean,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalTraining
from rayfl.methods.shared.stored_packets import buffers, packet_of


class FedSTCHyper(LocalTraining):
    """Hyper-parameters of FedSTC."""

    keep_ratio: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="share of the entries sent each way, p; or, up, clients.retention_ratio",
    )
    scope: Scope = Field(default="tensor", description="largest entries of every tensor, or of the whole model")


class FedSTCState(ModelState):
    """Client state, beside its copy of x."""

    residual: Tree  # A_i


class FedSTCServer(ModelState):
    """Server state, beside x."""

    residual: Tree  # A
    count: torch.Tensor  # the number of all broadcasts so far
    touched: Tree  # the number of the last broadcast that touched each entry
    broadcasts: NotRequired[dict[str, Tree]]  # the last ones as they were sent, by number


class FedSTCMemory(TypedDict):
    """The server's memory of a client."""

    count: torch.Tensor  # the number of broadcasts that the client has


class FedSTC(GradientMethod, KeptModel, on_device=True, keeps_parts=True):
    """Residuals A_i and A at both ends; both send STC of them."""

    hyper: FedSTCHyper
    paper = "Sattler et al., IEEE TNNLS 2019"
    gather = {"update": WeightedMean()}
    own_compression = True
    honours_retention = True
    own_retention = ("keep_ratio",)

    @cached_property
    def ternary(self) -> Ternary:
        """STC, both ways."""
        return Ternary(keep_ratio=self.hyper.keep_ratio, scope=self.hyper.scope)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedSTCState:
        return {"params": params, "residual": tree.zeros_like(params)}

    def begin(self, state: FedSTCState, received: Message, ctx: Context) -> LocalCarry:
        return self.start(caught_up(state["params"], received))

    def finish(self, state: FedSTCState, carry: LocalCarry, ctx: Context) -> Finished:
        update = tree.add(state["residual"], self.progress(carry))
        ratio = masks.kept_ratio(ctx.traits, None, self.hyper.keep_ratio)
        packet, _ = self.ternary.keeping(ratio).encode(update, {}, ctx.generator)
        state = {"params": carry["received"], "residual": tree.sub(update, packet.decode_beside(update))}
        return self.finished(state, {"update": packet}, carry, ctx)

    def receive_reply(self, state: FedSTCState, received: Message, ctx: Context) -> FedSTCState:
        return {**state, "params": caught_up(state["params"], received)}

    def init_server(self, params: Tree) -> FedSTCServer:
        return {
            "params": params,
            "residual": tree.zeros_like(params),
            "count": torch.tensor(0),
            "touched": tree.map(lambda tensor: torch.zeros(tensor.shape, dtype=torch.int32), params),
        }

    def init_server_memory(self, client: Traits, params: Tree) -> FedSTCMemory:
        return {"count": torch.tensor(0)}

    def personal_message(self, server: FedSTCServer, server_memory: FedSTCMemory, ctx: Context) -> Reply:
        return Reply(self._missed(server, int(server_memory["count"]), ctx), {"count": server["count"]})

    def reply(self, server: FedSTCServer, server_memory: FedSTCMemory, ctx: Context) -> Reply:
        return self.personal_message(server, server_memory, ctx)

    def update(self, server: FedSTCServer, received: Received, ctx: Context) -> FedSTCServer:
        update = tree.add(server["residual"], received["update"].result)
        packet, _ = self.ternary.encode(update, {}, ctx.generator)
        sent, support = packet.decode(), packet.support()
        number, sent_before = int(server["count"]) + 1, server.get("broadcasts", {})
        return {
            "params": tree.sub(server["params"], sent),
            "residual": tree.sub(update, sent),
            "count": torch.tensor(number),
            "touched": {name: before.masked_fill(support[name], number) for name, before in server["touched"].items()},
            "broadcasts": worth_keeping({**sent_before, str(number): buffers(packet)}, server["params"]),
        }

    def _missed(self, server: FedSTCServer, count: int, ctx: Context) -> Message:
        """The message to a client that has the first `count` broadcasts."""
        missing, kept = range(count + 1, int(server["count"]) + 1), server.get("broadcasts", {})
        codec = TernaryCodec(shapes_of(server["params"]), self.hyper.keep_ratio, self.hyper.scope)
        ways: list[Message] = []
        if all(str(number) in kept for number in missing):
            ways.append({f"update {n}": packet_of(kept[str(n)], codec) for n in missing})
        if len(missing) > 1:
            touched = tree.map(lambda last: last > count, server["touched"])
            ways.append({"model": Dense().encode(server["params"], {}, ctx.generator)[0]})
            ways.append({"touched": sparse_packet(server["params"], touched)})
        return min(ways, key=message_bits)


def caught_up(params: Tree, received: Message) -> Tree:
    """A client's copy of x after a download."""
    for name, packet in received.items():
        value = packet.decode()
        if name == "model":
            params = value
        elif name == "touched":
            support = packet.support()
            params = {name: torch.where(support[name], value[name], tensor) for name, tensor in params.items()}
        else:
            params = tree.sub(params, value)
    return params


def worth_keeping(broadcasts: dict[str, Tree], params: Tree) -> dict[str, Tree]:
    """The last broadcasts that are together smaller than the model, and the last one however large it is."""
    newest_first = sorted(broadcasts, key=int, reverse=True)
    sizes = [sum(part.nbytes for part in broadcasts[number].values()) for number in newest_first]
    num_kept = max(1, int((np.cumsum(sizes) < 4 * tree.num_entries(params)).sum()))
    return {number: broadcasts[number] for number in reversed(newest_first[:num_kept])}
