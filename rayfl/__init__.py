"""rayfl: federated-learning experiments as pure functions; `actors` runs them on Ray, `jobs` starts them.

From Python: `rayfl.run`, `rayfl.resume`, `rayfl.sweep`, `rayfl.load`, `rayfl.Experiment`. Each is
imported when it is first used: importing rayfl alone loads neither torch nor Ray. It sets the variables that numpy
reads when it is loaded, so import rayfl before numpy.
"""

import sys
from typing import TYPE_CHECKING, Any

from rayfl.determinism.process import prepare_process, warn_if_late
from rayfl.version import __version__

if TYPE_CHECKING:
    from jobs.python_api import resume, run, sweep
    from rayfl.experiment.experiment import Experiment
    from rayfl.report.results import load

__all__ = ["Experiment", "__version__", "load", "resume", "run", "sweep"]

_PLACES = {
    "Experiment": "rayfl.experiment.experiment",
    "load": "rayfl.report.results",
    "resume": "jobs.python_api",
    "run": "jobs.python_api",
    "sweep": "jobs.python_api",
}
"""The modules that define the names of `__all__`."""

# pytest loads rayfl's plug-in in every session of the environment, also in those of other projects.
if "_pytest" not in sys.modules:
    prepare_process()


# Any: a function or a class.
def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rayfl' has no attribute {name!r}")
    from importlib import import_module

    computes = _PLACES[name].startswith("jobs.")
    if computes:
        warn_if_late()
    prepare_process()
    if computes:
        from rayfl.limits.regular_files import require_current_folder
        from rayfl.own_packages import claim

        require_current_folder()
        claim("jobs")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
