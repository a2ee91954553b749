"""The experiment's uplink compressor, for methods that must see the packets they send (DIANA, LAG, SCAFFOLD)."""

from collections.abc import Mapping
from typing import NotRequired, TypedDict, TypeVar, cast

from rayfl.compress.base import Compressor, encode_trees
from rayfl.compress.dense import Dense
from rayfl.methods.base import Context, Packet, State, Tree


class UplinkMemory(TypedDict):
    """The part of a client's state that its uplink compressor remembers (error feedback)."""

    uplink: NotRequired[State]


Sender = TypeVar("Sender", bound=UplinkMemory)


def compressed(state: Sender, trees: Mapping[str, Tree], ctx: Context) -> tuple[dict[str, Packet], Sender]:
    """Encode trees with the experiment's uplink, and keep its memory in the client's state, under "uplink".

    For a client that does not send there are no packets, and its memory stays unchanged.
    """
    if not ctx.sends:
        return {}, state
    packets, memories = encode_trees(ctx.uplink, ctx.outgoing(trees), state.get("uplink", {}), ctx.generator)
    return packets, cast(Sender, {**state, "uplink": memories}) if memories else state


def uncompressed(trees: Mapping[str, Tree], ctx: Context) -> dict[str, Packet]:
    """Encode trees as they are, whatever the uplink is."""
    return encode_trees(Dense(), ctx.outgoing(trees), {}, ctx.generator)[0]


def contracting(compressor: Compressor, like: Tree) -> float:
    """The factor that makes a contraction of C: 1 / (1 + omega) if C is unbiased, else 1.

    C(v) / (1 + omega) is within omega / (1 + omega) ||v||^2 of v, in expectation.
    """
    return 1 / (1 + (compressor.omega(sum(tensor.numel() for tensor in like.values())) or 0.0))
