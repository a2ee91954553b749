"""Ray's label selectors, interpreted as Ray does, to report before a run that no node has the labels asked for."""

import re
from collections.abc import Iterable, Mapping


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node's labels satisfy a selector. A missing label is unequal to every value."""
    return all(_holds(condition, labels.get(key)) for key, condition in selector.items())


def _holds(condition: str, value: str | None) -> bool:
    inside = re.fullmatch(r"!?in\((.*)\)", condition)
    allowed = re.split(", ?", inside[1]) if inside else [condition.removeprefix("!")]
    return (value in allowed) != condition.startswith("!")


def unmatched(selector: Mapping[str, str], nodes: Iterable[Mapping[str, str]]) -> str:
    """Say which labels a selector asks for and which the nodes have: the first label that no node satisfies, or all."""
    labels = list(nodes)
    lacking = [key for key, value in selector.items() if not any(_holds(value, one.get(key)) for one in labels)]
    asked = ", ".join(f"{key}={selector[key]!r}" for key in lacking[:1] or selector)
    found = sorted({f"{key}={one[key]}" for one in labels for key in (lacking[:1] or selector) if key in one})
    if not found:
        own = sorted({key for one in labels for key in one if not key.startswith("ray.io/node-id")})
        return f"{asked}, and no node has that label; labels of nodes are: {', '.join(own[:8]) or 'none'}"
    together = "" if lacking else " together"
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"{asked}, and no node has that{together}; nodes have {', '.join(found[:8])}{more}"
