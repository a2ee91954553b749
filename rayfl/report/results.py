"""A run's directory, or a sweep's, as a Python program reads it: data frames, models, a plot.

Reading runs no code of the experiment's and loads no torch; building a model does, also of somebody's own class.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from rayfl.choices.plugins import is_in_memory
from rayfl.errors import RayflError, nearest
from rayfl.experiment.identity import determining_settings
from rayfl.report import wording
from rayfl.report.series import Curve, cost, curve, groups, is_accuracy, metric_names, series
from rayfl.report.summary import Summary, summary
from rayfl.run_directory.fetching import copy_for_reading
from rayfl.run_directory.object_storage import is_url, require_path
from rayfl.run_directory.record import Run, read_run, run_directories
from rayfl.run_directory.saved_models import load_model, model_keys
from rayfl.settings import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import nn

    from rayfl.experiment.experiment import Experiment
    from rayfl.models import Architecture
    from rayfl.tree import Tree

Cost = Literal["round", "total_megabytes", "total_uplink_megabytes", "total_simulated_s"]
"""What a curve is drawn against: rounds, or what they had cost by their end."""
_COSTS: Mapping[str, tuple[str, Callable[[Curve], np.ndarray]]] = {
    "round": ("Round", lambda curve: curve.rounds),
    "total_megabytes": ("Sent up and down, MB", lambda curve: curve.megabytes),
    "total_uplink_megabytes": ("Sent up, MB", lambda curve: curve.uplink_megabytes),
    "total_simulated_s": ("Simulated time, s", lambda curve: curve.simulated_s),
}


def load(directory: str | Path) -> "RunResults | SweepResults":
    """The results in a run's directory, or in that of a sweep: a folder of run directories. At a URL they are those of
    the run there, which is fetched for as long as this process lives.

    A run may be finished, cut or under way; of the last two the results are what was recorded by now. RayflError for
    another directory, and for records that are damaged.
    """
    if isinstance(directory, str) and is_url(directory):
        return RunResults(read_run(copy_for_reading(directory)))
    require_path(str(directory))
    place = Path(directory).absolute()
    found = run_directories(place)
    if found == [place]:
        return RunResults(read_run(place))
    return SweepResults(place, [RunResults(read_run(one)) for one in found])


class RunResults:
    """What a run recorded: its tables, its numbers, its models. Nothing here changes the directory.

    arrow: the same as Arrow tables, `arrow.rounds`, `arrow.clients` and `arrow.metrics`.
    """

    def __init__(self, run: Run, experiment: "Experiment | None" = None) -> None:
        """`experiment`: the one that was run, where this process has it: its classes need no name to be found by."""
        self.arrow = run
        self._experiment = experiment

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.arrow.directory

    @property
    def finished(self) -> bool:
        """Whether all rounds are recorded. A run that is not goes on with `rayfl.resume(directory)`."""
        return self.arrow.finished

    @property
    def settings(self) -> Mapping[str, object]:
        """The resolved experiment, nested as in its file."""
        return self.arrow.experiment

    @property
    def summary(self) -> Summary:
        """The run in numbers: accuracies as shares in [0, 1], megabytes of 1e6 bytes, seconds."""
        return summary(self.arrow)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row a round: round, selected, delivered, uplink_bits, downlink_bits, simulated_s, wall_s."""
        return self.arrow.rounds.to_pandas()

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row a client and round: round, client, status, uplink_bits, downlink_bits, num_samples, num_steps,
        simulated_s."""
        return self.arrow.clients.to_pandas()

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row a value: round, client, name, value. `client` is missing for a value of the round, the server or a mean
        over clients."""
        return self.arrow.metrics.to_pandas().astype({"client": "Int32"})

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a round: the columns of `rounds`, all rounds' costs by its end (total_megabytes,
        total_uplink_megabytes, total_simulated_s), and a column a metric: the round's value, else the mean over its
        clients; NaN where it was not evaluated."""
        spent = cost(self.arrow)
        costs = {
            "total_megabytes": spent.megabytes,
            "total_uplink_megabytes": spent.uplink_megabytes,
            "total_simulated_s": spent.simulated_s,
        }
        frame = self.rounds.assign(**costs).set_index("round")
        columns = {}
        for name in metric_names(self.arrow):
            if (found := series(self.arrow, name)) is not None:
                columns[name] = pd.Series(found.values, index=found.rounds)
        return frame.join(pd.DataFrame(columns, index=frame.index)).reset_index()

    @property
    def model_names(self) -> list[str]:
        """The final models that the run has saved: "global", "personal", both or none."""
        found = (path.stem for path in (self.directory / "models").glob("*.safetensors"))
        return sorted({re.sub(r"-[0-9]{4,}$", "", stem) for stem in found})

    def model(self) -> "nn.Module":
        """The final global model with its weights, in evaluation mode, on the CPU.

        A class from somebody's own file or module is imported for it, and runs. The data are read, because the network
        has their shapes. RayflError where the run has saved no global model, where data or class are gone, and where
        a method's weights are not those of the network.
        """
        if "global" not in self.model_names and "personal" in self.model_names:
            raise RayflError(f"{self.directory} has no global model, only personal ones: use personal_model(client)")
        return self._built(load_model(self.directory, "global"), "global")

    def personal_model(self, client: int) -> "nn.Module":
        """The final model of one client, as `model` returns the global one. RayflError where it has none."""
        prefix = f"{client}/"
        found = load_model(self.directory, "personal", prefix)
        weights = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
        if not weights:
            having = sorted({int(name.partition("/")[0]) for name in model_keys(self.directory, "personal")})
            raise RayflError(
                f"client {client} has no model of its own in {self.directory}, because it was never selected or does "
                f"not exist: those that have one are {_ranges(having)}"
            )
        return self._built(weights, "personal")

    def _built(self, weights: "Tree", name: str) -> "nn.Module":
        import torch

        architecture, shapes = self._network
        # To build a module draws its first weights, which must not move the program's own random numbers.
        with torch.random.fork_rng(devices=()):
            module = architecture.build(*shapes)
        known = dict(module.named_parameters())
        wrong = next((key for key in known if key not in weights or weights[key].shape != known[key].shape), None)
        wrong = wrong or next((key for key in weights if key not in known), None)
        if wrong is not None:
            have, want = (tuple(tree[wrong].shape) if wrong in tree else "none" for tree in (weights, known))
            raise RayflError(
                f"the {name} model in {self.directory} is no plain {architecture.name!r}: its {wrong} has the shape "
                f"{have}, and the network's {want}; read the weights with safetensors"
            )
        module.load_state_dict(weights, strict=False)
        return module.eval()

    @cached_property
    def _network(self) -> "tuple[Architecture, tuple[tuple[int, ...], int]]":
        """The architecture, and the arguments of its `build`."""
        from rayfl.experiment.experiment import read

        experiment = self._experiment or read(self.directory / "experiment.toml")
        dataset = experiment.data.load()
        return experiment.model, (tuple(dataset.input_shape), dataset.num_classes)

    def plot(self, name: str, against: Cost = "round", ax: "Axes | None" = None) -> "Axes":
        """Draw a metric, as "own/accuracy", and return matplotlib's axes; by default on a new figure of pyplot's.

        RayflError, with the nearest names, for one that was not recorded.
        """
        return _plot([self.arrow], name, against, ax)

    def __repr__(self) -> str:
        return f"<{_state(self)} in {self.directory}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the run in numbers, and where it lies."""
        numbers = self.summary
        rows = []
        for name, value in numbers["final"].items():
            best = numbers["best"][name]
            words = f"{wording.percent(value)} (best {wording.percent(best['value'])} in round {best['round']})"
            rows.append((name, words))
        rows += [
            ("sent up", wording.megabytes(numbers["uplink_megabytes"])),
            ("sent down", wording.megabytes(numbers["downlink_megabytes"])),
            ("updates delivered", f"{numbers['delivered']} of {numbers['selected']}"),
            ("simulated time", wording.seconds(numbers["simulated_s"])),
            ("real time", wording.seconds(numbers["wall_s"])),
        ]
        go_on = (
            "" if self.finished else f"<p>go on with <code>rayfl.resume({escape(repr(str(self.directory)))})</code></p>"
        )
        table = "".join(f"<tr><th>{escape(key)}</th><td>{escape(words)}</td></tr>" for key, words in rows)
        return (
            f"<p><b>{escape(numbers['name'])}</b>: {escape(_state(self))}</p><table>{table}</table>"
            f"<p><code>{escape(str(self.directory))}</code></p>{go_on}"
        )


class SweepResults:
    """The runs of a sweep, in its order; those that were loaded, in the order of their directories' names."""

    def __init__(self, directory: Path, runs: Sequence[RunResults]) -> None:
        self.directory, self.runs = directory, list(runs)

    @cached_property
    def settings(self) -> pd.DataFrame:
        """A row a run: its directory's name (run), its seed, and each setting in which the runs differ, by its dotted
        key (method.lr); missing where a run has no such setting."""
        tables = [{"seed": one.settings.get("seed"), **determining_settings(one.settings)} for one in self.runs]
        keys = list(dict.fromkeys(key for table in tables for key in table))
        varied = [key for key in keys if len({repr(table.get(key)) for table in tables}) > 1 or key == "seed"]
        names = [one.directory.name for one in self.runs]
        return pd.DataFrame({"run": names, **{key: [table.get(key) for table in tables] for key in varied}})

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a run and round: the columns of `settings`, and those of `RunResults.frame`."""
        parts = []
        for one, (_, row) in zip(self.runs, self.settings.iterrows(), strict=True):
            own = pd.DataFrame({key: [value] * len(one.frame) for key, value in row.items()}, index=one.frame.index)
            parts.append(pd.concat([own, one.frame], axis=1))
        return pd.concat(parts, ignore_index=True) if parts else self.settings

    @cached_property
    def summary(self) -> pd.DataFrame:
        """A row a run: the columns of `settings`, finished, rounds, the last value of each accuracy (a share in
        [0, 1]), and uplink_megabytes, downlink_megabytes, simulated_s and wall_s of all rounds."""
        numbers = [one.summary for one in self.runs]
        plain = ("finished", "rounds")
        costs = ("uplink_megabytes", "downlink_megabytes", "simulated_s", "wall_s")
        names = list(dict.fromkeys(name for one in numbers for name in one["final"]))
        columns = {key: [one[key] for one in numbers] for key in plain}
        columns |= {name: [one["final"].get(name) for one in numbers] for name in names}
        columns |= {key: [one[key] for one in numbers] for key in costs}
        return pd.concat([self.settings, pd.DataFrame(columns)], axis=1)

    def plot(self, name: str, against: Cost = "round", ax: "Axes | None" = None) -> "Axes":
        """Draw a metric of all runs, a line for those that differ in nothing but their seed: their mean, with a band of
        one standard deviation. Otherwise as `RunResults.plot`."""
        return _plot([one.arrow for one in self.runs], name, against, ax)

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        return f"<{self._state()} in {self.directory}>"

    def _state(self) -> str:
        finished = sum(one.finished for one in self.runs)
        return f"sweep of {len(self.runs)} runs" + (f", {finished} of them finished" * (finished < len(self.runs)))

    def _repr_html_(self) -> str:
        """What a notebook shows: a row a run."""
        return (
            f"<p>{escape(self._state())}</p>{self.summary.to_html(index=False, na_rep='')}"
            f"<p><code>{escape(str(self.directory))}</code></p>"
        )


def _state(found: RunResults) -> str:
    done, planned = len(found.arrow.rounds), found.settings.get("rounds")
    return f"run of {done} rounds" if found.finished else f"run of {done} of {planned} rounds"


def _in_memory(settings: Mapping[str, object]) -> bool:
    """Whether something of an experiment was given from Python, so that it cannot be resumed."""
    return any(isinstance(table, Mapping) and is_in_memory(table.get("name")) for table in settings.values())


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 3, 7, or "none"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts) or "none"


def _plot(runs: Sequence[Run], name: str, against: str, ax: "Axes | None") -> "Axes":
    """One line for the runs that differ in nothing but their seed: their mean, with a band of one deviation."""
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    if against not in _COSTS:
        raise RayflError(f"against={shown(against)} is not allowed; it must be one of {', '.join(_COSTS)}")
    known = dict.fromkeys(each for run in runs for each in metric_names(run))
    if name not in known:
        raise RayflError(f"no metric {name!r} was recorded: {nearest(name, known)}")
    label, values_of = _COSTS[against]
    ax = ax if ax is not None else pyplot.subplots()[1]
    found = groups(runs)
    for group in found:
        if (drawn := curve(group, name)) is None:
            continue
        (line,) = ax.plot(values_of(drawn), drawn.mean, label=group.label)
        if drawn.deviation.any():
            low, high = drawn.mean - drawn.deviation, drawn.mean + drawn.deviation
            ax.fill_between(values_of(drawn), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set_xlabel(label)
    ax.set_ylabel(wording.title(name))
    if is_accuracy(name):
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(found) > 1:
        ax.legend()
    return ax
