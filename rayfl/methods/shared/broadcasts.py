"""A server that broadcasts compressed steps of its model and keeps the rest as a residual; clients hold copies of it.

Server: A += the mean, C = compressed A, A -= C, x -= C. A client that delivered gets C at the end of its round. A
client that was absent for s rounds first downloads what it missed in the cheapest of three forms: the s broadcasts as
they were, the new values of all entries that they changed, or the model. All three give the server's x to the last bit.
A single missed broadcast is always sent as it was. All copies begin at the common x^0, made from the seed, which is not
sent.
"""

from abc import abstractmethod
from typing import NotRequired, TypedDict

import numpy as np
import torch

from rayfl.compress.base import Codec, message_bits
from rayfl.compress.sparse import sparse_packet
from rayfl.methods.base import (
    Compressor,
    Context,
    Dense,
    KeptModel,
    Message,
    Method,
    ModelState,
    Reply,
    State,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.shared.stored_packets import buffers, packet_of


class BroadcastServer(ModelState):
    """Server state, beside x."""

    residual: Tree  # A
    count: torch.Tensor  # the number of all broadcasts so far
    touched: Tree  # the number of the last broadcast that changed each entry
    broadcasts: NotRequired[dict[str, Tree]]  # the last ones as they were sent, by number


class BroadcastMemory(TypedDict):
    """The server's memory of a client."""

    count: torch.Tensor  # the number of broadcasts that the client has


class Broadcasting(Method, KeptModel):
    """The server's steps, and the clients' copies of x, which are "params" in their states."""

    @property
    @abstractmethod
    def step_compressor(self) -> Compressor:
        """The compressor that makes C from A."""

    @abstractmethod
    def step_codec(self, like: Tree) -> Codec:
        """The codec that decodes C, in the shapes of `like`."""

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        return {**state, "params": caught_up(state["params"], received)}

    def init_server(self, params: Tree) -> BroadcastServer:
        return {
            "params": params,
            "residual": tree.zeros_like(params),
            "count": torch.tensor(0),
            "touched": tree.map(lambda tensor: torch.zeros(tensor.shape, dtype=torch.int32), params),
        }

    def init_server_memory(self, client: Traits, params: Tree) -> BroadcastMemory:
        return {"count": torch.tensor(0)}

    def personal_message(self, server: BroadcastServer, server_memory: BroadcastMemory, ctx: Context) -> Reply:
        return Reply(self._missed(server, int(server_memory["count"]), ctx), {"count": server["count"]})

    def reply(self, server: BroadcastServer, server_memory: BroadcastMemory, ctx: Context) -> Reply:
        return Broadcasting.personal_message(self, server, server_memory, ctx)

    def broadcast(self, server: BroadcastServer, mean: Tree, ctx: Context) -> BroadcastServer:
        """The server's state after the broadcast of a step along A + mean."""
        update = tree.add(server["residual"], mean)
        packet, _ = self.step_compressor.encode(update, {}, ctx.generator)
        sent, support = packet.decode(), packet.support()
        number, sent_before = int(server["count"]) + 1, server.get("broadcasts", {})
        return {
            "params": tree.sub(server["params"], sent),
            "residual": tree.sub(update, sent),
            "count": torch.tensor(number),
            "touched": {name: before.masked_fill(support[name], number) for name, before in server["touched"].items()},
            "broadcasts": worth_keeping({**sent_before, str(number): buffers(packet)}, server["params"]),
        }

    def _missed(self, server: BroadcastServer, count: int, ctx: Context) -> Message:
        """The message to a client that has the first `count` broadcasts."""
        missing, kept = range(count + 1, int(server["count"]) + 1), server.get("broadcasts", {})
        ways: list[Message] = []
        if all(str(number) in kept for number in missing):
            codec = self.step_codec(server["params"])
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
    """The latest broadcasts that together are smaller than the model, and always the last one."""
    newest_first = sorted(broadcasts, key=int, reverse=True)
    sizes = [sum(part.nbytes for part in broadcasts[number].values()) for number in newest_first]
    num_kept = max(1, int((np.cumsum(sizes) < 4 * tree.num_entries(params)).sum()))
    return {number: broadcasts[number] for number in reversed(newest_first[:num_kept])}
