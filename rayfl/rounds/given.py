"""What a call gives to the hooks of several clients, and whether a hook has written to it.

A tensor counts the writes to it, so one look at the end of a call is enough. It does not count writes through `.data`,
or through an array that shares its memory: those are found by the contract in rayfl/testing.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.methods.base import Method
from rayfl.rounds.errors import HookError

# Any: trees, states and memories.
Nested = TypeVar("Nested", bound=Mapping[str, Any])


class Given:
    """The tensors that the hooks of `method` are given in one call, each with the number of writes to it so far."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self._tensors: list[tuple[str, str, Tensor, int]] = []
        self._messages: list[Message] = []

    def note(self, what: str, nested: Nested) -> Nested:
        """Note the tensors of a tree, which is called `what`, and return the tree."""
        for name, leaf in tree.flatten(nested).items():
            # A mask was unpacked into memory of its own, which would be kept until the end of the call.
            if isinstance(leaf, Tensor) and leaf.dtype != torch.bool:
                self._tensors.append((what, name, leaf, leaf._version))
        return nested

    def note_message(self, message: Message) -> Message:
        """Note the trees that clients will decode (`Opened`), and return the message."""
        self._messages.append(message)
        return message

    def require_unchanged(self) -> None:
        """Raise HookError if somebody has written to one of the tensors."""
        for message in self._messages:
            for key, packet in message.items():
                decoded = vars(packet).get("_decoded", {})
                self._tensors += [(f"the message {key!r}", name, leaf, 0) for name, leaf in decoded.items()]
        for what, name, tensor, version in self._tensors:
            if tensor._version != version:
                raise HookError(
                    f"{type(self.method.innermost).__name__}, or the model that it trains, changes {what} in place "
                    f"({name!r}), which other clients and later rounds read: make a new tensor, such as x + y or "
                    "x.clone().add_(y) in place of x.add_(y)"
                )
