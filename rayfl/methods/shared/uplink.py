"""The experiment's uplink compressor, for methods that must see the packets they send (DIANA, LAG, SCAFFOLD)."""

from collections.abc import Mapping

from rayfl.compress.base import Packet, encode_trees
from rayfl.methods.base import Context
from rayfl.tree import State, Tree


def compressed(state: State, trees: Mapping[str, Tree], ctx: Context) -> tuple[dict[str, Packet], State]:
    """Encode trees with the experiment's uplink; its memory stays in the client's state, under "uplink".

    A client that does not send gets no packets, and its memory stays as it was.
    """
    if not ctx.sends:
        return {}, state
    packets, memories = encode_trees(ctx.uplink, trees, state.get("uplink", {}), ctx.generator)
    return packets, {**state, "uplink": memories} if memories else state
