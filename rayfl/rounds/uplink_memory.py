"""The memory of a client's uplink compressor, which is stored beside the method's state and hidden from the method."""

from typing import Any

from rayfl.compress.base import Message, Packet, encode_trees
from rayfl.compress.dense import Dense
from rayfl.methods.base import Context, State, Upload

UPLINK_MEMORY = "uplink memory"
"""The memory's name in a client's stored state; no method may use this name."""


def without_memory(stored: State) -> tuple[State, State]:
    """Split a stored state into the method's state and the compressor's memory by message name."""
    state = dict(stored)
    return state, state.pop(UPLINK_MEMORY, {})


def with_memory(state: State, memory: State) -> State:
    """Join both into the state that is stored: the inverse of `without_memory`."""
    return {**state, UPLINK_MEMORY: memory} if memory else state


def encode_upload(upload: Upload, memory: State, ctx: Context) -> tuple[Message, State]:
    """Encode the trees of an upload with the experiment's uplink; returns the message and the compressor's new memory.

    Random compressors draw from the client's generator after the method's own draws.
    """
    trees = {name: part for name, part in upload.items() if not isinstance(part, Packet)}
    # Dense draws nothing, and takes less time than making a generator.
    draws: Any = None if type(ctx.uplink) is Dense else ctx.generator
    packets, memory = encode_trees(ctx.uplink, trees, memory, draws)
    return {name: part if isinstance(part, Packet) else packets[name] for name, part in upload.items()}, memory
