"""Broadcasts through a compressed downlink: C(x - h) is sent, where h is the tree that all clients hold.

The first broadcast of a tree is not compressed. Every later one is an encoded difference, and h moves by what its
receivers decode; so the next difference contains what C left out. A compressor with error feedback (`feedback`) encodes
the change of x since the last broadcast instead, because its memory contains what was left out.
A client that missed broadcasts is sent, and billed for, all of them or the whole h, whichever is smaller. The same
holds for packets of methods that define themselves what their clients hold (`held.added_to`), compressed or not; all
clients of such methods hold the same trees before round 0. Messages to single clients (`personal_message`, `reply`) do
not pass through here: the method encodes them.
"""

from collections.abc import Iterable

import torch

from rayfl import tree
from rayfl.compress.base import Message, Packet, decoded_bytes, encode_trees
from rayfl.compress.dense import Dense
from rayfl.compress.held import HeldCodec, added_to
from rayfl.methods.base import Context, State, Tree
from rayfl.methods.hook_types import encode_broadcast
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import Missed


def broadcast(setup: Setup, server: State, state: State, ctx: Context) -> tuple[Message, State]:
    """The message to every participant, and the state of the downlink after it; {} if clients need not hold anything.

    Both are {} if the plan has no download.

    The state has, with a tree for each name in the message, "held" (h), the compressor's "memory", and with error
    feedback "last" (x at the last broadcast). "sent", int64 [2], are the bits and values of all broadcasts so far;
    "had", int64 [num_clients, 2], is "sent" at the last broadcast that a client received, and before its first one -1,
    or 0 if all clients begin with the same trees.
    """
    if not ctx.plan.down:
        return {}, {}
    download = checked_hook(setup.server_half.download)(server, ctx)
    message = {name: part for name, part in download.items() if isinstance(part, Packet)}
    steps = [name for name, part in message.items() if isinstance(part.codec, HeldCodec)]
    if isinstance(setup.downlink, Dense) and setup.downlink.dtype == "fp32" and not steps:
        return encode_broadcast(download, ctx), {}
    trees = {name: part for name, part in download.items() if not isinstance(part, Packet)}
    held: dict[str, Tree] = dict(state.get("held", {}))
    memory: dict[str, Tree] = dict(state.get("memory", {}))
    # An error memory has the name of its tensor; other memories (PowerSGD's factor) are not a part of x.
    remembers = bool(setup.downlink.init(setup.initial).keys() & setup.initial.keys())
    for name, x in trees.items():
        if name in held:
            since = state["last"] if remembers else held
            packets, memory = encode_trees(setup.downlink, {name: tree.sub(x, since[name])}, memory, ctx.generator)
            message[name] = added_to(held[name], packets[name])
        else:
            message[name], _ = Dense().encode(x, {}, ctx.generator)
        held[name] = message[name].decode()
    nobody = torch.full((setup.num_clients, 2), -1 if trees else 0)
    sent = state.get("sent", torch.zeros(2, dtype=torch.int64)) + _size(message, [*trees, *steps])
    last = {**state.get("last", {}), **trees} if remembers else {}
    return message, {"held": held, "last": last, "memory": memory, "sent": sent, "had": state.get("had", nobody)}


def missed(state: State, message: Message, clients: Iterable[int]) -> dict[int, Missed]:
    """What each client is sent beyond the broadcast `message`; `state` is the downlink's state after that broadcast.

    The sizes are negative if a client is sent the whole trees, and these are smaller than `message`.
    """
    if not state:
        return {}
    names = [name for name, packet in message.items() if name in state["held"] or isinstance(packet.codec, HeldCodec)]
    whole = 8 * sum(decoded_bytes(message[name]) * getattr(message[name].codec, "num_whole", 1) for name in names)
    now = _size(message, names)
    by_client = dict[int, Missed]()
    for client in clients:
        had = state["had"][client]
        bits, values = (state["sent"] - now - had).tolist()
        if had[0] < 0 or bits > whole - now[0]:
            bits, values = whole - int(now[0]), whole // 32 - int(now[1])
        by_client[client] = Missed(bits, values)
    return by_client


def received(state: State, clients: Iterable[int]) -> State:
    """The state of the downlink after these clients have received the last broadcast."""
    if not state:
        return state
    had = state["had"].clone()
    had[list(clients)] = state["sent"]
    return {**state, "had": had}


def _size(message: Message, names: Iterable[str]) -> torch.Tensor:
    """Bits and values of the packets under these names: int64 [2]."""
    packets = [message[name] for name in names]
    return torch.tensor([sum(packet.num_bits for packet in packets), sum(packet.num_values for packet in packets)])
