"""Names for values whose types the code cannot state, each for another origin of the values. All stand for `Any`."""

from collections.abc import Mapping
from typing import Any

Json = Any
"""What JSON holds: null, a bool, a number, a text, a list, or an object whose keys are texts."""
Value = Any
"""The value of a setting as it was given: what TOML holds, or a class, a function or an object from Python."""
SettingsTable = Mapping[str, Any]
"""A table of settings, of an experiment's file or from Python: `Value`s by their keys, which may be dotted."""
Foreign = Any
"""An argument, a result or an object of another library, which exports no type for it."""
Anything = Any
"""What a state, a message, a plug-in or a template may hold: code that walks through it asks for the type."""
Outputs = Any
"""What a model returns for a batch: a tensor, or a tuple or a dictionary of tensors."""
