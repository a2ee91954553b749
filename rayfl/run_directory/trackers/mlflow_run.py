"""A run in MLflow: a file store in the run directory, or the server or store that MLFLOW_TRACKING_URI names."""

import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rayfl.run_directory.trackers.tracker import Mark, Status, TrackedRun, model_files

FOLDER = "mlflow"
"""The file store's name in the run directory."""
_HERE = "the run directory"
_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """One run of MLflow's, in the experiment of the run's project (or MLFLOW_EXPERIMENT_NAME)."""

    def __init__(self, run: TrackedRun, earlier: Mark | None, num_recorded: int) -> None:
        """Resume the earlier run if it still exists, or start a new one. Raise MlflowException if MLflow refuses."""
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._local = None if uri else run.directory / FOLDER
        if uri:
            # By default MLflow tries for ten minutes, and the run would wait.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        else:
            # MLflow refuses its file store, which it no longer develops, unless this is set.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri or (run.directory / FOLDER).as_uri())
        place = uri or _HERE
        if earlier is None or earlier.place != place or not self._reopened(earlier.run):
            earlier = Mark(place=place, run=self._begun(run), next_round=0)
        self.mark: Mark | None = earlier
        self.next_round = earlier.next_round
        self._run = self._client.get_run(earlier.run).info
        self._client.set_tag(earlier.run, "mlflow.note.content", run.markdown)
        if self._local is None:
            self._client.log_text(earlier.run, run.text, "experiment.toml")
        else:
            (self._artifacts / "experiment.toml").write_text(run.text, encoding="utf-8")

    def _reopened(self, name: str) -> bool:
        """Set an earlier run to RUNNING; return False if it does not exist any more."""
        try:
            if self._client.get_run(name).info.lifecycle_stage != "active":
                return False
            self._client.update_run(name, status="RUNNING")
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return False
            raise
        return True

    def _begun(self, run: TrackedRun) -> str:
        """Create a run with its tags and hyper-parameters; returns its id."""
        tags = {**dict.fromkeys(run.tags, "true"), **run.chosen("method", "data", "model", "uplink")}
        tags |= {"group": run.group} if run.group else {}
        name = self._client.create_run(
            self._experiment(run.project), run_name=run.directory.name, tags=tags
        ).info.run_id
        self._client.log_batch(name, params=[Param(_plain(key), str(value)) for key, value in run.settings.items()])
        return name

    def _experiment(self, project: str) -> str:
        """The id of the experiment of this name, which is created if needed. Another run may create it meanwhile."""
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        try:
            return self._client.create_experiment(project)
        except MlflowException:
            if (found := self._client.get_experiment_by_name(project)) is None:
                raise
            return found.experiment_id

    def round(self, round: int, values: Mapping[str, float]) -> None:
        """Send all values of the round in one call."""
        now = int(time.time() * 1000)
        metrics = [Metric(_plain(name), float(value), now, round) for name, value in values.items()]
        self._client.log_batch(self._run.run_id, metrics=metrics)

    def model(self, path: Path) -> None:
        """Log a model and its inputs as artifacts below models/. In the file store they are hard links, which take no
        space."""
        for file in model_files(path):
            if self._local is None:
                self._client.log_artifact(self._run.run_id, str(file), "models")
            else:
                self._link(file)

    def _link(self, path: Path) -> None:
        place = self._artifacts / "models" / path.name
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        try:
            os.link(path, place)
        except OSError:
            shutil.copyfile(path, place)

    def close(self, status: Status) -> None:
        """End the run in this state."""
        self._client.set_terminated(self._run.run_id, _STATUS[status])

    @property
    def _artifacts(self) -> Path:
        """Where the file store has the run's artifacts. MLflow itself notes an absolute path, which is wrong once the
        run directory was moved."""
        assert self._local is not None
        return self._local / self._run.experiment_id / self._run.run_id / "artifacts"


def _plain(name: str) -> str:
    """The name with _ in place of characters that MLflow does not allow."""
    return re.sub(r"[^A-Za-z0-9_./: -]", "_", name)
