"""The use of the object stores of all nodes, as Ray counts it."""

from typing import NamedTuple

import ray

# No public call of Ray has these figures; its command `ray memory` takes them from here.
from ray._private.internal_api import get_memory_info_reply, get_state_from_address


class StoreUse(NamedTuple):
    """All nodes together: bytes in the stores now, and bytes spilled to disk and read back since Ray started."""

    used_bytes: int
    spilled_bytes: int
    restored_bytes: int


def store_use() -> StoreUse:
    """The figures of the cluster that this process is connected to."""
    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return StoreUse(stats.object_store_bytes_used, stats.spilled_bytes_total, stats.restored_bytes_total)
