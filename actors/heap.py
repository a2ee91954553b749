"""Small client states: Ray keeps returned values below 100 kB in the memory of the caller, here the coordinator.

They then need no object store, and cannot spill to disk. Measured with 2,000 clients of scaffold, 45 kB each, 100 a
round on two actors: 0.25 s a round instead of 0.31 in the store, and 110 MB more in the coordinator.
"""

from rayfl import tree
from rayfl.limits.memory import machine_bytes
from rayfl.rounds.setup import Setup
from rayfl.tree import State

LIMIT_BYTES = 100 * 1024
"""Ray's own limit, `max_direct_call_object_size`."""

LOW_LIMIT_BYTES = 8192
"""A lower limit, above which most states, but no small results, go to the object store."""

_OVERHEAD = 1.6
"""The memory of such a state in the coordinator, as a multiple of its bytes; from the measurement above."""

ADVICE = (
    "the states of all clients would fill much of this machine's memory, because Ray keeps states this small in the "
    "coordinator, which cannot spill them to disk; start the cluster with "
    f"RAY_max_direct_call_object_size={LOW_LIMIT_BYTES}"
)


def overflows(setup: Setup) -> bool:
    """Whether states that Ray keeps in the coordinator would take more than a quarter of this machine's memory."""
    objects: list[State] = []
    if setup.stateful:
        objects.append({**setup.first_state(0), "uplink": setup.uplink.init(setup.initial)})
    if setup.has_server_memory:
        objects.append(setup.first_server_memory(0))
    sizes = [tree.num_bytes(tree.to_arrays(state)) for state in objects]
    small = sum(size for size in sizes if LOW_LIMIT_BYTES < size < LIMIT_BYTES)
    return _OVERHEAD * setup.num_clients * small > machine_bytes() / 4
