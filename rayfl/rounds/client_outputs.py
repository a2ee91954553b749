"""ClientOutputs: the objects that a call returns for a client, and that a later call reads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rayfl import tree
from rayfl.rounds.errors import HookError

OBJECT_BYTES = 1_000_000
"""States of several clients share an object up to this size: to fetch it takes hardly longer than to fetch one of them,
since every object takes about a millisecond."""


@dataclass(frozen=True)
class Slots:
    """Which objects a call carries per client.

    The flat list has all objects of the first client in field order, then the next client's.
    """

    state: bool = False
    memory: bool = False
    message: bool = False
    packets: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.state + self.memory + self.message + len(self.packets)

    def kept(self, num_clients: int) -> tuple[range, ...]:
        """The places of the states of all clients, and of the memories."""
        return tuple(
            range(at, num_clients * len(self), len(self)) for at in range(self.state + self.memory) if num_clients
        )


# Any: the caller has references; the worker has the objects behind them.
@dataclass(frozen=True)
class ClientOutputs:
    """The objects of one client in a call; None if there is no such object, or if the call has no slot for it.

    `memory`: the server's memory of the client; `message`: the client's message (with its weight, if there is a
    server); `packets`: the packets that the server forwards without decoding them, by message name.
    """

    state: Any = None
    memory: Any = None
    message: Any = None
    packets: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: Slots, state: tree.State, memory: tree.State, **sent: Any) -> Self:
        """The outputs with state and memory as arrays. Raise HookError for one that the method did not begin with."""
        firsts = ((state, slots.state, "init_client"), (memory, slots.memory, "init_server_memory"))
        if lost := [hook for kept, has_slot, hook in firsts if kept and not has_slot]:
            raise HookError(f"a hook returns a state to keep, and {lost[0]} returned none; return the first one there")
        return cls(tree.to_arrays(state), tree.to_arrays(memory), **sent)

    def pack(self, slots: Slots) -> list[Any]:
        """The objects that have a slot, in order."""
        kept = ((self.state, slots.state), (self.memory, slots.memory), (self.message, slots.message))
        return [value for value, wanted in kept if wanted] + [self.packets.get(name) for name in slots.packets]

    @classmethod
    def unpack(cls, slots: Slots, clients: Sequence[int], objects: Iterable[Any]) -> dict[int, Self]:
        """The inverse of `pack` for the clients of a call."""
        left = iter(objects)
        return {client: cls._next(slots, left) for client in clients}

    @classmethod
    def _next(cls, slots: Slots, left: Iterator[Any]) -> Self:
        state, memory, message = [next(left) if has else None for has in (slots.state, slots.memory, slots.message)]
        return cls(state, memory, message, {name: next(left) for name in slots.packets})
