"""The facts of a run's metrics, metrics.json: what a report of a later day must know of them without their classes."""

from collections.abc import Mapping
from pathlib import Path

from rayfl.errors import RayflError, reason
from rayfl.limits.json_files import read_json
from rayfl.metrics.facts import RECORDED_BEFORE, Facts
from rayfl.run_directory.disk import write_json
from rayfl.run_directory.part import Part

METRICS = "metrics.json"
PART = Part(
    (r"metrics\.json",),
    {
        "`metrics.json`": "of every value that is evaluated: its title, unit and range, which way is better, and what "
        "a page draws of it"
    },
)


def write_metric_facts(directory: Path, facts: Mapping[str, Facts]) -> None:
    """Write the facts of every value, by its name without the place. Raise OSError if writing fails."""
    write_json(directory / METRICS, {name: one.model_dump() for name, one in facts.items()})


def read_metric_facts(directory: Path) -> Mapping[str, Facts]:
    """What `write_metric_facts` wrote; of a run from before, loss and accuracy. Raise RayflError if it is damaged."""
    path = directory / METRICS
    if not path.exists():
        return RECORDED_BEFORE
    try:
        return {name: Facts(**given) for name, given in read_json(path).items()}
    except (OSError, ValueError, TypeError) as error:
        raise RayflError(f"{path} cannot be read ({reason(error)}): restore it, or run the experiment again") from None
