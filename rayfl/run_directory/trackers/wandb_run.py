"""A run in Weights & Biases: offline files in the run directory unless WANDB_MODE says otherwise."""

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from rayfl.run_directory.trackers.tracker import TrackedRun

FOLDER = "wandb"
"""Where wandb writes in the run directory."""
_LONGEST_NAME = 128


class WandbRun:
    """One run of W&B's, in the project of the run's experiment (or WANDB_PROJECT).

    A resumed run has the id of its earlier folders in the same mode. Offline each process writes a folder of its own,
    and `wandb sync` joins the folders of one id by time. W&B writes in a process of its own: a kill can lose the last
    rounds that it was sent.
    """

    def __init__(self, run: TrackedRun, num_recorded: int) -> None:
        """Resume the earlier run if its mode is the same, or start a new one. Raise what wandb raises."""
        # W&B's reports of errors to its makers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode = os.environ.get("WANDB_MODE") or "offline"
        self._folder = run.directory / FOLDER
        kind = "offline-run" if mode == "offline" else "run"
        ids = [path.stem.removeprefix("run-") for path in self._folder.glob(f"{kind}-*/run-*.wandb")]
        self._run = wandb.init(
            dir=str(run.directory),
            id=ids[0] if ids else secrets.token_hex(4),
            resume="allow",
            # A separate run, even if the program already has one.
            reinit="create_new",
            project=(os.environ.get("WANDB_PROJECT") or str(run.experiment["name"]))[:_LONGEST_NAME],
            name=run.directory.name[:_LONGEST_NAME],
            # The runs of a sweep lie in one folder.
            group=(os.environ.get("WANDB_RUN_GROUP") or run.directory.absolute().parent.name)[:_LONGEST_NAME],
            notes=run.markdown,
            config=dict(run.experiment),
            # wandb's type is the list of the modes.
            mode=mode,  # pyright: ignore[reportArgumentType]
            settings=wandb.Settings(
                silent=True,
                console="off",
                symlink=False,
                disable_git=True,
                save_code=False,
                # They would be about the coordinator, which computes nothing.
                x_disable_stats=True,
            ),
        )
        self._remove_links()

    def round(self, round_number: int, values: Mapping[str, float]) -> None:
        """Log all values of the round as one step, unless the server of an online run has it."""
        if round_number >= self._run.starting_step:
            self._run.log({name: float(value) for name, value in values.items()}, step=round_number, commit=True)

    def model(self, path: Path) -> None:
        """Log a model as an artifact, with its inputs. Files are read when they are uploaded, and not copied before."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{self._run.id}-{path.stem}")
        artifact = wandb.Artifact(name, type="model")
        for file in (path, path.with_name("inputs.json")):
            artifact.add_file(str(file), skip_cache=True, policy="immutable")
        self._run.log_artifact(artifact)

    def close(self, finished: bool) -> None:
        """End this process's part; anything but a finished run counts as failed there."""
        self._run.finish(exit_code=0 if finished else 1)
        self._remove_links()

    def _remove_links(self) -> None:
        """Remove wandb's links to the log of its service: a run with links in its directory cannot be resumed."""
        for path in self._folder.glob("*/logs/*"):
            if path.is_symlink():
                path.unlink()
