"""RunState: what is kept from one round to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayfl.rounds.air import Air
from rayfl.rounds.client_outputs import ClientOutputs, Slots
from rayfl.rounds.executor import Ref
from rayfl.tree import State


@dataclass(frozen=True)
class RunState:
    """What is kept from one round to the next: the next round's number, the server's state, those of the selection and
    of a compressed downlink, references to clients' states and to the server's memories of them, and who is under way.

    A client that has not taken part yet is in neither `states` nor `server_memories`. `changed`: the round in which
    they last changed, by client; clients that have not changed since the run was started or resumed may be missing.
    """

    round: int = 0
    server: State = field(default_factory=dict)
    selection: State = field(default_factory=dict)
    downlink: State = field(default_factory=dict)
    states: Mapping[int, Ref] = field(default_factory=dict)
    server_memories: Mapping[int, Ref] = field(default_factory=dict)
    air: Air = field(default_factory=Air)
    changed: Mapping[int, int] = field(default_factory=dict)

    def inputs(self, slots: Slots, clients: Sequence[int]) -> tuple[Ref, ...]:
        """References to the states and memories of clients, which a call reads; None before a client's first round."""
        kept = (ClientOutputs(self.states.get(client), self.server_memories.get(client)) for client in clients)
        return tuple(ref for outputs in kept for ref in outputs.pack(slots))

    def updated(self, slots: Slots, outputs: Mapping[int, ClientOutputs]) -> "RunState":
        """The run state with the new states and memories of these clients."""
        if not slots:
            return self
        states = {client: one.state for client, one in outputs.items()} if slots.state else {}
        memories = {client: one.memory for client, one in outputs.items()} if slots.memory else {}
        return replace(
            self,
            states={**self.states, **states},
            server_memories={**self.server_memories, **memories},
            changed={**self.changed, **dict.fromkeys(outputs, self.round)},
        )
