"""The graph on which the contract plays a method."""

from rayfl.methods.base import Capabilities
from rayfl.topology.mixing import FITTING
from rayfl.untyped import Value


def fitting_graph(can: Capabilities) -> dict[str, Value]:
    """A `[topology]` table that gives a method what it needs, whoever is absent."""
    weights = FITTING[can.needs_weights]
    ring = {"name": "ring"} if weights == "uniform" else {"name": "ring", "weights": weights}
    return {"name": "grid", "rows": 1} if can.needs_tree else ring
