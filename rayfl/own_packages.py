"""The packages `actors` and `jobs` that were installed with this rayfl, and no others of these names.

A project may well have a folder `jobs/` or `actors/`, and Python looks into the current directory before it looks into
the installed packages: with `python -m`, in notebooks, and in Ray's workers. So the two are imported from beside rayfl,
wherever `sys.path` leads; once they are, their modules are found in them. Importing this module imports `actors`.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def claim(name: str) -> None:
    """Import the package `name` from beside rayfl. ImportError where this process has imported another one."""
    found = sys.modules.get(name)
    if found is None:
        spec = PathFinder.find_spec(name, [_HOME])
        assert spec is not None and spec.loader is not None, f"{name} lies beside rayfl"
        sys.modules[name] = found = module_from_spec(spec)
        try:
            spec.loader.exec_module(found)
        except BaseException:
            del sys.modules[name]
            raise
    # Of a folder without __init__.py `__path__` has all that are called so.
    places = [os.path.realpath(place) for place in getattr(found, "__path__", ())]
    if places != [os.path.realpath(os.path.join(_HOME, name))]:
        other = getattr(found, "__file__", None) or next(iter(places), "an unknown place")
        raise ImportError(
            f"rayfl has a package {name!r}, and this process has imported another one of that name, from {other}: "
            "rename that one, or run rayfl in a process of its own with: python -m rayfl run FILE"
        )


claim("actors")


class OwnPackages:
    """Base of Ray's actors. Ray pickles these by value, and bases first: so a worker imports this module before any
    other of ours, and has our `actors`."""
