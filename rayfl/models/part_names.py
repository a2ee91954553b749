"""Finds the parameters of a module that the patterns of `parts.personal` choose."""

import fnmatch
from collections.abc import Mapping, Sequence

from torch import nn

from rayfl.errors import RayflError, did_you_mean
from rayfl.settings import shown

PERSONAL = ("parts", "personal")
LOCAL = "leave some to share, or take method 'local'"


def chosen(
    patterns: Sequence[str], module: nn.Module, model: str, key: tuple[str, ...] = PERSONAL, cure: str = LOCAL
) -> tuple[str, ...]:
    """The names of the trained parameters of `module` that `patterns` choose, in the module's order.

    A pattern with wildcards as in file names (`head.*`) is compared with the names of parameters, of the modules that
    contain them, and of the class of their innermost module. One that begins with ! excludes parameters again. Raise
    RayflError for a pattern that matches nothing, and if all patterns together choose none of the parameters, or all:
    it names the setting `key` and, for all, the `cure`.
    """
    aliases = _aliases(module)
    choices = dict.fromkeys(aliases, False)
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        named = [name for name in aliases if fnmatch.filter(aliases[name], plain)]
        if not named:
            close = did_you_mean(plain, set().union(*aliases.values()))
            raise RayflError(
                f" has {shown(pattern)}, which names no trained parameter of model {model!r}, and no module or "
                f"class with one; {close}",
                key,
            )
        choices |= dict.fromkeys(named, pattern == plain)
    names = tuple(name for name, is_chosen in choices.items() if is_chosen)
    if patterns and len(names) in (0, len(aliases)):
        wrong, cure = ("none", "change it") if not names else ("all", cure)
        raise RayflError(
            f"={shown(patterns)} chooses {wrong} of the {len(aliases)} trained parameters of model {model!r}; {cure}",
            key,
        )
    return names


def _aliases(module: nn.Module) -> Mapping[str, set[str]]:
    """For each trained parameter by name: its name, those of the modules around it, and its owner's class name."""
    aliases: dict[str, set[str]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            inside = name.split(".")
            owner = module.get_submodule(".".join(inside[:-1]))
            aliases[name] = {".".join(inside[:end]) for end in range(1, len(inside) + 1)} | {type(owner).__name__}
    return aliases
