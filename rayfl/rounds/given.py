"""What a call gives to the hooks of several clients, and whether a hook has written to it.

A tensor counts the writes to it, so one look at the end of a call is enough. It does not count writes through `.data`,
or through an array that shares its memory: those are found by the contract in rayfl/testing.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.methods.base import Method
from rayfl.rounds.errors import HookError

# Any: trees, states and memories.
Nested = TypeVar("Nested", bound=Mapping[str, Any])


class Given:
    """What the hooks of `method` are given in one call, with the number of writes to it so far."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self._trees: list[tuple[str, Mapping[str, Any], int]] = []
        self._messages: list[Message] = []

    def note(self, what: str, nested: Nested) -> Nested:
        """Note the tensors of a tree, which is called `what`, and return the tree."""
        noted = _numbers(nested)
        self._trees.append((what, noted, _writes(noted)))
        return nested

    def note_message(self, message: Message) -> None:
        """Note the trees that clients will decode (`Opened`)."""
        self._messages.append(message)

    def require_unchanged(self) -> None:
        """Raise HookError if somebody has written to one of the tensors."""
        for message in self._messages:
            self._trees += [(f"the message {key!r}", vars(one).get("_decoded", {}), 0) for key, one in message.items()]
        for what, nested, before in self._trees:
            if _writes(nested) != before:
                most = max(tree.flatten(nested).items(), key=lambda named: named[1]._version)
                raise HookError(
                    f"{type(self.method.innermost).__name__}, or the model that it trains, changes {what} in place "
                    f"({most[0]!r}), which other clients and later rounds read: make a new tensor, such as x + y or "
                    "x.clone().add_(y) in place of x.add_(y)"
                )


# Any: leaves of a tree, a state or a memory.
def _numbers(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without masks, which are unpacked into memory of their own and would be kept until the end of the call."""
    return {
        name: _numbers(leaf) if isinstance(leaf, dict) else leaf
        for name, leaf in nested.items()
        if isinstance(leaf, dict) or (isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool)
    }


def _writes(nested: Mapping[str, Any]) -> int:
    """The number of writes to all tensors of a tree."""
    return sum([_writes(leaf) if isinstance(leaf, dict) else leaf._version for leaf in nested.values()])
