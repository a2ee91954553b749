"""The results of a run or a sweep for a Python program: data frames and models.

Reading results runs no code of the experiment and loads no torch; building a model does both.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from rayfl.errors import RayflError, one_line
from rayfl.experiment.identity import determining_settings, require_copies
from rayfl.experiment.report_options import ReportOptions, agreed_options
from rayfl.limits.regular_files import path_of
from rayfl.report.groups import group_runs, ranked_names
from rayfl.report.numbers import number
from rayfl.report.series import cost, metric_names, series
from rayfl.report.summary import Summary, summary
from rayfl.run_directory.object_storage import is_url, require_path
from rayfl.run_directory.record import Run, read_run, run_directories
from rayfl.run_directory.run_folder import copy_for_reading
from rayfl.run_directory.saved_models import CONSTANTS, load_model, model_files, read_model_inputs
from rayfl.settings import dotted, shown
from rayfl.untyped import Value

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from rayfl.experiment.experiment import Experiment
    from rayfl.models.base import Architecture
    from rayfl.models.predictor import Predictor
    from rayfl.report.pivot import Pivot
    from rayfl.tree import Tree

_PREDICTED_AT_ONCE = 1000
"""Number of inputs, as many as a run evaluates at once."""


def load(directory: str | Path) -> "RunResults | SweepResults":
    """Read the results of a run from its directory or its URL, or those of a sweep from its folder of run directories.

    A run at a URL is copied for as long as this process lives. For a run that is not finished the results are those
    recorded until now. Raise RayflError if the directory is neither, or if records are damaged.
    """
    if isinstance(directory, str) and is_url(directory):
        return RunResults(read_run(copy_for_reading(directory)))
    require_path(str(directory))
    path = path_of(directory, "directory").absolute()
    runs = [RunResults(read_run(folder)) for folder in run_directories(path)]
    return runs[0] if runs[0].directory == path else SweepResults(path, runs)


class Recorded:
    """Results of the runs `recorded`, whose page can be drawn."""

    recorded: Sequence[Run]

    def save_figures(self, folder: str | Path, overwrite: bool = False) -> list[Path]:
        """Write each figure of the page as SVG and PDF, and its main tables as CSV and LaTeX; return the paths.

        Raise RayflError if the folder has files and `overwrite` is false.
        """
        from rayfl.report.page import write_figures

        options = agreed_options([run.experiment for run in self.recorded])
        return write_figures(self.recorded, path_of(folder, "folder"), options, overwrite)


class RunResults(Recorded):
    """What a run recorded: its tables, its numbers, its models. Nothing here changes the directory.

    directory: the run directory. finished: whether all rounds are recorded; `rayfl.resume(directory)` continues a run
    that is not finished. settings: the resolved experiment, nested as in its file. arrow: the same as Arrow tables,
    `arrow.rounds`, `arrow.clients` and `arrow.metrics`.
    """

    def __init__(self, run: Run, experiment: "Experiment | None" = None) -> None:
        """`experiment`: the experiment that was run, if this process has it, so that no class needs to be imported."""
        self.arrow = run
        self.recorded = [run]
        self._experiment = experiment
        self.directory = run.directory
        self.finished = run.finished
        self.settings = run.experiment

    @property
    def summary(self) -> Summary:
        """The run in numbers: shares in [0, 1], megabytes of 1e6 bytes, seconds."""
        return summary(self.arrow)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row per round: round, selected, delivered, uplink_bits, downlink_bits, simulated_s, wall_s."""
        return self.arrow.rounds.to_pandas()

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row per client and round: round, client, status, uplink_bits, downlink_bits, num_samples, num_steps,
        simulated_s."""
        return self.arrow.clients.to_pandas()

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per value: round, client, name, value. `client` is missing for values of the round or server and for
        means over clients."""
        return self.arrow.metrics.to_pandas().astype({"client": "Int32"})

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row per round: the columns of `rounds`, all rounds' costs by its end (total_megabytes,
        total_uplink_megabytes, total_simulated_s), and a column per metric: the round's value, else the mean over its
        clients; NaN if it was not evaluated."""
        frame = self.rounds.assign(**cost(self.arrow)._asdict()).set_index("round")
        every = {name: series(self.arrow, name) for name in metric_names(self.arrow)}
        columns = {name: pd.Series(values.values, values.rounds) for name, values in every.items() if values}
        return frame.join(pd.DataFrame(columns, index=frame.index)).reset_index()

    @cached_property
    def fairness(self) -> pd.DataFrame:
        """A row per value of single clients at the last evaluation ("own/accuracy", "own/recall/3"), with the columns
        of `rayfl.metrics.fairness.fairness`. `frame` has them of every evaluation (own_worst/accuracy)."""
        return pd.DataFrame(self.summary["fairness"]).T

    @property
    def model_names(self) -> list[str]:
        """The final models that the run has saved: "global", "personal", both or none."""
        return [name for name in ("global", "personal") if model_files(self.directory, name)]

    def predict(
        self, inputs: "ArrayLike | pd.DataFrame | Mapping[str, ArrayLike]", client: int | None = None
    ) -> np.ndarray:
        """Return the most likely class of each input, by the global model or by that of one client: their names [n], if
        the data name their classes, otherwise their numbers, int64 [n].

        inputs: raw ones [n, ...], as `Predictor.forward` takes them; of a table also a data frame, with the columns by
        their names; of several inputs a tuple or a dictionary of arrays. Raise RayflError as that and `model` do, and
        without a client if each client has parts of its own.
        """
        import torch

        from rayfl.determinism.torch_flags import own_flags
        from rayfl.models.frame_inputs import rows_of_frame

        settings = dotted(self.settings)
        trained = settings.get("parts.personal") and settings.get("parts.order") != "shared-only"
        is_split = trained or settings.get("parts.buffers") == "personal"
        if client is None and "global" in self.model_names and is_split:
            raise RayflError(
                f"each client of the run in {self.directory} has parts of the model for itself; give client=NUMBER, "
                "or call results.model() for what they share, with the initial values of their parts"
            )
        model = self.model() if client is None else self.personal_model(client)
        described = read_model_inputs(self.directory)
        if not described.has_classes:
            raise RayflError(f"the run in {self.directory} predicts no classes; call results.model() for its outputs")
        data = model.data
        if data.layout is not None:
            rows = data.layout.pack("the list of inputs", inputs)
        elif isinstance(inputs, pd.DataFrame) and data.input_names:
            fills = settings.get("data.missing") in ("mean", "category")
            rows = rows_of_frame(inputs, data.input_names, data.mean if fills else ())
        else:
            rows = np.asarray(inputs)
        if rows.dtype.kind not in "biuf":
            raise RayflError(f"inputs={shown(inputs)} are not numbers; give an array of raw inputs [n, ...]")
        with own_flags(), torch.no_grad():
            outputs = [model(part) for part in torch.from_numpy(rows).split(_PREDICTED_AT_ONCE)]
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise RayflError(
                f"the model in {self.directory} returns several outputs; call results.model() for what it returns"
            )
        numbers = torch.cat(outputs).argmax(1).numpy()
        return np.array(described.classes)[numbers] if described.classes else numbers

    def model(self) -> "Predictor":
        """The final global model with its weights, in evaluation mode, on the CPU. Of `[parts]` that clients keep it
        has the initial values.

        It takes inputs as they are in the data's files, and preprocesses them as the run did; its `network` is the
        network alone. A class from your own file or module is imported, so its code runs. The data are not read. Raise
        RayflError if the run has saved no global model, if the class is gone or changed, or if the method's weights are
        not those of the network.
        """
        if "global" not in self.model_names and "personal" in self.model_names:
            raise RayflError(f"{self.directory} has no global model, only personal ones: use personal_model(client)")
        return self._built(load_model(self.directory, "global"), "global")

    def personal_model(self, client: int) -> "Predictor":
        """The final model of one client, as `model` returns the global one. Raise RayflError if it has none."""
        weights, constants = (
            {key.removeprefix(prefix): tensor for key, tensor in load_model(self.directory, "personal", prefix).items()}
            for prefix in (f"{client}/", f"{CONSTANTS}/")
        )
        if not weights:
            raise RayflError(
                f"client {client} has no model of its own in {self.directory}, because it was never selected or does "
                "not exist: name another client"
            )
        return self._built(weights | constants, "personal")

    def _built(self, weights: "Tree", name: str) -> "Predictor":
        from rayfl.determinism.global_draws import seeded
        from rayfl.determinism.seeding import torch_seed
        from rayfl.determinism.torch_flags import own_flags
        from rayfl.models.adapters import Adapters
        from rayfl.models.predictor import Predictor
        from rayfl.models.widths.narrow import narrow_like
        from rayfl.network import named_weights

        architecture = self._architecture
        inputs = read_model_inputs(self.directory)
        data = inputs.without_samples()
        # As the run built it: a tensor that is neither a parameter nor a buffer is in no file.
        with own_flags(), seeded(torch_seed(int(str(self.settings["seed"])), purpose="initial parameters")):
            build = architecture.builder(data.input_shape, data.num_classes, data.layout)
            if isinstance(adapters := self.settings.get("adapters"), dict):
                build = Adapters(**adapters).builder(build)
            module = build()
            have = {key: tuple(tensor.shape) for key, tensor in weights.items()}
            if name == "personal" and have != {key: tuple(t.shape) for key, t in named_weights(module).items()}:
                with suppress(RayflError):
                    module = narrow_like(build, data.input_shape, have)
        slots = named_weights(module)
        want = {key: tuple(tensor.shape) for key, tensor in slots.items()}
        if wrong := [key for key in {**want, **have} if have.get(key) != want.get(key)]:
            raise RayflError(
                f"the {name} model in {self.directory} is not a plain {architecture.name!r}: its {wrong[0]} has the "
                f"shape {have.get(wrong[0], 'none')}, and the network's {want.get(wrong[0], 'none')}; read the weights "
                "with safetensors"
            )
        for key, tensor in slots.items():
            tensor.data.copy_(weights[key])
        return Predictor(module, data, architecture.memory_format, inputs.precision).eval()

    @cached_property
    def _architecture(self) -> "Architecture":
        """The run's architecture. RayflError if one of its files is not as it was when the run began."""
        from rayfl.choices.kinds import resolve
        from rayfl.experiment.table import located
        from rayfl.models.base import Architecture

        if self._experiment is not None:
            return self._experiment.model
        table = located({"model": self.settings.get("model")}, self.directory)
        require_copies(self.settings, table, self.directory)
        return resolve(Architecture, table["model"])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        numbers = pd.Series(self.summary["final"] | self.summary)
        return numbers[[not isinstance(value, dict) for value in numbers]].to_frame().to_html(header=False)

    def __repr__(self) -> str:
        planned = f" of {self.settings.get('rounds')}" * (not self.finished)
        return one_line(f"<run of {len(self.arrow.rounds)}{planned} rounds in {self.directory}>")


class SweepResults(Recorded):
    """The runs of a sweep, in its order."""

    def __init__(self, directory: Path, runs: Sequence[RunResults]) -> None:
        self.directory = directory
        self.runs = list(runs)
        self.recorded = [run.arrow for run in self.runs]

    @cached_property
    def settings(self) -> pd.DataFrame:
        """A row per run: its directory's name (run), its seed, and each setting in which the runs differ, by its dotted
        key (method.lr); missing if a run has no such setting."""
        tables = [{"seed": run.settings.get("seed"), **determining_settings(run.settings)} for run in self.runs]
        every = {key: [table.get(key) for table in tables] for key in dict.fromkeys(chain(*tables))}
        columns = {key: values for key, values in every.items() if len({*map(repr, values)}) > 1 or key == "seed"}
        return pd.DataFrame({"run": [run.directory.name for run in self.runs], **columns})

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row per run and round: the columns of `settings`, and those of `RunResults.frame`."""
        frames = [run.frame.set_axis([index] * len(run.frame)) for index, run in enumerate(self.runs)]
        return self.settings.join(pd.concat(frames), how="inner").reset_index(drop=True) if frames else self.settings

    @cached_property
    def summary(self) -> pd.DataFrame:
        """A row per run: the columns of `settings`, finished, rounds, the last value of each metric that ranks runs
        (shares in [0, 1]), and uplink_megabytes, downlink_megabytes, simulated_s and wall_s of all rounds."""
        numbers = pd.DataFrame([{**run.summary, **run.summary["final"]} for run in self.runs])
        names = dict.fromkeys(name for run in self.runs for name in run.summary["final"])
        columns = ["finished", "rounds", *names, "uplink_megabytes", "downlink_megabytes", "simulated_s", "wall_s"]
        return pd.concat([self.settings, numbers[columns]], axis=1)

    def numbers(self, *names: str, last: int = 3, metric: str | None = None) -> pd.DataFrame:
        """A row per run: the columns of `settings`, and each of the numbers `names`; missing if a run lacks it.

        "own/accuracy": the mean of its `last` values; "own/accuracy:best" (final, mean, sum); "megabytes" and the other
        costs of `rayfl.report.numbers`; "rounds@0.8": the cost of a target of `metric`, by default the metric that
        ranks the runs. Raise RayflError for a number that no run has.
        """
        groups = group_runs(self.recorded)
        ranked = ranked_names(groups, metric)
        every = [number(name, groups, ranked[0] if ranked else None, last) for name in names]
        return self.settings.assign(**{shown.name: [shown.read(run) for run in self.recorded] for shown in every})

    def table(
        self,
        rows: str | Sequence[str] = "label",
        columns: str | Sequence[str] = (),
        values: str | Sequence[str] = (),
        baseline: object = None,
        **options: Value,
    ) -> "Pivot":
        """Numbers by the items of one or two swept settings ("method.lr", "case", "case,method.lr"): an object with
        `frame`, `to_csv()`, `to_markdown()` and `to_latex()`; `print(table)` shows it.

        values: numbers as `numbers` names them, by default the metric that ranks the runs. baseline: the row or column
        with which the others are compared, seed by seed. options: best_over, metric and last, as in `[report]`. Raise
        RayflError for what no run has, and if the runs of a cell differ in another setting.
        """
        from rayfl.report.pivot import pivots

        base = None if baseline is None else str(baseline)
        table = {"rows": rows, "columns": columns, "values": values, "baseline": base}
        return pivots(group_runs(self.recorded), ReportOptions(**{**options, "tables": [table]}))[0]

    def __len__(self) -> int:
        return len(self.runs)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.summary.to_html(index=False)

    def __repr__(self) -> str:
        finished = sum(run.finished for run in self.runs)
        return one_line(f"<sweep of {len(self.runs)} runs, {finished} of them finished, in {self.directory}>")
