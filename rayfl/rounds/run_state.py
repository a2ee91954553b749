"""RunState: what outlives a round, and how calls read it and write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayfl.rounds.client_outputs import ClientOutputs, Slots
from rayfl.rounds.executor import Ref
from rayfl.tree import State


@dataclass(frozen=True)
class RunState:
    """What outlives a round: the next round's number, the server's state, and references to what clients left behind.

    `states` and `server_memories` lack the clients that have not taken part yet.
    """

    round: int = 0
    server: State = field(default_factory=dict)
    states: Mapping[int, Ref] = field(default_factory=dict)
    server_memories: Mapping[int, Ref] = field(default_factory=dict)

    def inputs(self, slots: Slots, clients: Sequence[int]) -> tuple[Ref, ...]:
        """What a call reads of the clients' states and the server's memories of them; None before the first round."""
        kept = (ClientOutputs(self.states.get(client), self.server_memories.get(client)) for client in clients)
        return tuple(ref for outputs in kept for ref in outputs.pack(slots))

    def updated(self, slots: Slots, outputs: Mapping[int, ClientOutputs]) -> "RunState":
        """With the new states and memories that clients left behind."""
        states = {client: one.state for client, one in outputs.items()} if slots.state else {}
        memories = {client: one.memory for client, one in outputs.items()} if slots.memory else {}
        return replace(self, states={**self.states, **states}, server_memories={**self.server_memories, **memories})
