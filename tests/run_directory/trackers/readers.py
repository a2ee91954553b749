"""What the trackers hold of a run, read with their own packages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rayfl.run_directory.trackers.wandb_run import offline_records

Points = list[tuple[int, float]]
"""Step and value, in the order in which they were sent."""


def tensorboard(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def mlflow_client(directory: Path) -> MlflowClient:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        return MlflowClient(tracking_uri=(directory / "mlflow").as_uri())


def mlflow_runs(directory: Path) -> list[Run]:
    client = mlflow_client(directory)
    return client.search_runs([one.experiment_id for one in client.search_experiments()])


def wandb_records(directory: Path) -> Iterator[Any]:
    """The records of all offline files, by time, as `wandb sync` would send them."""
    return offline_records(directory / "wandb", "*")


def points(tracker: str, directory: Path, name: str) -> Points:
    """One metric's values in a tracker."""
    if tracker == "tensorboard":
        return [(event.step, event.value) for event in tensorboard(directory).Scalars(name)]
    if tracker == "mlflow":
        (run,) = mlflow_runs(directory)
        history = mlflow_client(directory).get_metric_history(run.info.run_id, name)
        return [(metric.step, metric.value) for metric in history]
    found = []
    for record in wandb_records(directory):
        if record.WhichOneof("record_type") == "history":
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if name in values:
                found.append((int(values["_step"]), values[name]))
    return found
