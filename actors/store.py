"""What Ray says of the object stores of its nodes."""

from typing import NamedTuple

import ray

# Ray tells these figures to its own command `ray memory`, and to no one else.
from ray._private.internal_api import get_memory_info_reply, get_state_from_address


class StoreUse(NamedTuple):
    """Of all nodes together: bytes in the stores now, and what went to disk and came back since Ray was started."""

    used_bytes: int
    spilled_bytes: int
    restored_bytes: int


def store_use() -> StoreUse:
    """The figures of the cluster that this process is connected to."""
    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return StoreUse(stats.object_store_bytes_used, stats.spilled_bytes_total, stats.restored_bytes_total)
