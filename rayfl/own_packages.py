"""The packages `actors` and `jobs` that were installed with this rayfl, and no others of these names.

A user's project may have folders `jobs/` or `actors/`, and with `python -m`, in notebooks and in Ray's workers Python
looks into the current directory before the installed packages. So `claim` imports these packages from the folder that
contains rayfl, whatever `sys.path` says. Importing this module imports `actors`.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def claim(name: str) -> None:
    """Import the package `name` that lies beside rayfl. Raise ImportError if another one has been imported."""
    package = sys.modules.get(name)
    if package is None:
        spec = PathFinder.find_spec(name, [_HOME])
        assert spec is not None and spec.loader is not None, f"{name} lies beside rayfl"
        sys.modules[name] = package = module_from_spec(spec)
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise
    # If there is no __init__.py, `__path__` has all folders of this name.
    places = [os.path.realpath(place) for place in getattr(package, "__path__", ())]
    if places != [os.path.realpath(os.path.join(_HOME, name))]:
        other = getattr(package, "__file__", None) or next(iter(places), "an unknown place")
        raise ImportError(
            f"rayfl has a package {name!r}, and this process has imported another one of that name, from {other}: "
            "rename that one, or run rayfl in a process of its own with: python -m rayfl run FILE"
        )


claim("actors")


class OwnPackages:
    """Base class of Ray's actors, so that a worker imports this module, and with it our `actors`, before any other.

    Ray pickles actors by value, base classes first.
    """
