"""Small states: Ray keeps returned values below 100 kB in the memory of the caller, here the coordinator.

There they cost no way through the object store, and they cannot spill. Measured with 2,000 clients of scaffold, 45 kB
each, 100 a round on two actors: 0.25 s a round against 0.31 in the store, and 110 MB more in the coordinator.
"""

import os

from rayfl import tree
from rayfl.rounds.setup import Setup
from rayfl.tree import State

LIMIT_BYTES = 100 * 1024
"""Ray's own limit, `max_direct_call_object_size`."""

LOW_LIMIT_BYTES = 8192
"""The limit with which states go to the object store, and small results still do not."""

_OVERHEAD = 1.6
"""Memory that such a state takes over its bytes; measured as above."""

ADVICE = (
    "the states of all clients would fill much of this machine's memory, in the coordinator, from where they cannot go "
    f"to disk; start the cluster with RAY_max_direct_call_object_size={LOW_LIMIT_BYTES}"
)


def overflows(setup: Setup, memory_bytes: int | None = None) -> bool:
    """Whether states that Ray keeps in the coordinator would take more than a quarter of its machine's memory."""
    memory_bytes = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    objects: list[State] = []
    if setup.stateful:
        objects.append({**setup.first_state(0), "uplink": setup.uplink.init(setup.initial)})
    if setup.has_server_memory:
        objects.append(setup.first_server_memory(0))
    sizes = [tree.num_bytes(tree.to_arrays(state)) for state in objects]
    small = sum(size for size in sizes if LOW_LIMIT_BYTES < size < LIMIT_BYTES)
    return _OVERHEAD * setup.num_clients * small > memory_bytes / 4
