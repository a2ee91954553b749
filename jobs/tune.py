"""Tune an experiment under a budget: Optuna draws trials, and each trial is a run that is evaluated on validation data.

    [tune]
    seed = 100
    method.lr = {low = 0.001, high = 1.0, log = true}       # whole numbers if both ends are whole
    method.mu = [0.1, 1.0, 10.0]

All trials have the seed of `[tune]` and `evaluation.split` "validation", so that no test example influences a choice.
Each case of a `[sweep]` is tuned by itself; a `[[sweep.case]]` may have a table `tune` of its own, which adds to
`[tune]`. Optuna stores nothing. When a stopped tuning continues, its seeded sampler draws the same trials again; the
results of those with finished runs in the directory are read from there.
"""

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Literal

import numpy as np
from pydantic import Field

from actors import supervision
from jobs import console, display, failures, resuming, single, sweep
from rayfl import toml
from rayfl.errors import ClientError, Diverged, RayflError, out_of_memory
from rayfl.experiment import identity, prepare, report_options, table
from rayfl.experiment import sweep as sweeps
from rayfl.experiment.experiment import Experiment
from rayfl.metrics import comparable, facts
from rayfl.report import groups, series
from rayfl.run_directory import disk, record, run_folder
from rayfl.settings import Settings, dotted, shown
from rayfl.untyped import SettingsTable, Value

try:
    import optuna
    from optuna.trial import TrialState
except ImportError:
    raise RayflError("tuning needs the package optuna: run `pip install 'rayfl[tune]'`") from None

BEST = "best.toml"
"""The experiment file with the best values, in a tune's directory."""
_FIXED = {*identity.NOT_DETERMINING, "runtime", "evaluation", "sweep", "tune"}
"""Tables and settings that do not change how well a model learns."""


class Options(Settings):
    """The settings of the `[tune]` table beside the values to draw from."""

    seed: int = Field(default=100, ge=0, description="seed of all trials; it must differ from the experiment's seeds")
    pruner: Literal["median", "asha", "none"] = Field(
        default="median",
        description="ends bad trials early: median, if worse than the median of the others; asha, successive halving",
    )


class Tuning:
    """The experiments to tune: a file's `table` without `[tune]` and `[sweep]`, the `cases` of its sweep by label (as
    in `[[sweep.case]]`; {} if only seeds are swept), and for each case the list or range of each tuned setting.

    Settings in `overrides` are not tuned. Raise RayflError if a case is invalid, at any end of its ranges.
    """

    def __init__(
        self, experiment: SettingsTable, lists: Mapping[str, list[Value]] | None, overrides: Sequence[str] = ()
    ) -> None:
        lists = lists or {}
        keys = {setting: ".".join(table.split_override(setting)[0]) for setting in overrides}
        self.table = table.copied(experiment)
        # Every trial sets these three itself.
        self.overrides = [setting for setting, key in keys.items() if key not in ("label", "seed", "evaluation.split")]
        tune = dict(self.table.pop("tune", {}))
        self.name = self.table["name"]
        self.options = Options(**{key: tune.pop(key) for key in Options.model_fields if key in tune})
        self.seeds = lists.get("seed", [self.table.get("seed", 1)])
        if self.options.seed in self.seeds:
            raise RayflError(f"tune.seed={self.options.seed} is a seed of the experiment too; give another one")
        self.cases = {case.get("label", self.name): case for case in sweeps.as_cases(lists) or [{}]}
        self.ranges = {
            label: {
                key: suggestions
                for key, suggestions in (_ranges(tune) | _ranges(case.pop("tune", {}))).items()
                if key not in keys.values()
            }
            for label, case in self.cases.items()
        }
        sweeps.combine(
            self.table, {"case": [{**case, "label": label} for label, case in self.cases.items()]}, overrides
        )
        for label, ranges in self.ranges.items():
            if (fixed := {key for key in ranges if key.partition(".")[0] in _FIXED}) or not ranges:
                raise RayflError(
                    f"tune.{min(fixed)} is not allowed, as it does not change how well a model learns"
                    if fixed
                    else f"nothing is tuned for {label}: give tune.KEY={{low=..., high=...}} or tune.KEY=[VALUE, ...]"
                )
            for key, suggestions in ranges.items():
                ends = (
                    range(len(suggestions))
                    if isinstance(suggestions, list)
                    else (suggestions.get("low"), suggestions.get("high"))
                )
                for end in ends or (0,):
                    self.trial(label, {key: _drawn(optuna.trial.FixedTrial({key: end}), key, suggestions)})

    def values(self, label: str, asked: optuna.trial.BaseTrial) -> dict[str, Value]:
        """The values of a trial by dotted key."""
        return {key: _drawn(asked, key, suggestions) for key, suggestions in self.ranges[label].items()}

    def title(self, label: str, values: SettingsTable) -> str:
        """The name of a trial, after its case and its values."""
        words = [f"{key.rpartition('.')[2]}={sweeps.described(value)}" for key, value in values.items()]
        return ", ".join([label] * bool(self.cases[label] or not words) + words)

    def trial(self, label: str, values: SettingsTable) -> sweeps.Combination:
        """The experiment of a trial. Raise RayflError if its values do not fit."""
        changes = {
            **values,
            "label": self.title(label, values),
            "seed": self.options.seed,
            "evaluation.split": "validation",
        }
        return sweeps.case_of(self.table, _with(self.cases[label], changes), self.overrides)

    def best(self, studies: Mapping[str, optuna.Study], note: str) -> str:
        """The text of the experiment file with the best values. `note`: the note for its report."""
        best = {at: self.values(at, optuna.trial.FixedTrial(study.best_params)) for at, study in studies.items()}
        cases = [_with(case, best[label], self.overrides) for label, case in self.cases.items() if case]
        lists = {"seed": self.seeds if self.seeds != [self.table.get("seed", 1)] else None, "case": cases or None}
        best_table = _with(self.table, {"report.note": note, **({} if cases else best[self.name])})
        if any(setting.startswith("runtime.executor=") for setting in self.overrides):
            # As --inline: where the trials ran.
            best_table["runtime"].pop("executor", None)
        return toml.dumps(table.absolute({**best_table, "sweep": lists if any(lists.values()) else None}))


def _with(settings: SettingsTable, changes: SettingsTable, overrides: Sequence[str] = ()) -> dict[str, Value]:
    """The table with other settings, by dotted key, after the overrides of tables that it has."""
    inside = [setting for setting in overrides if table.split_override(setting)[0][0] in settings]
    return table.with_overrides(table.copied(settings), inside, changes)[0]


def _ranges(tune_table: SettingsTable) -> dict[str, Value]:
    """The lists and ranges of a `[tune]` table by their dotted keys, whether nested or not."""
    ranges: dict[str, Value] = {}
    for key, value in dotted(tune_table).items():
        outer, _, name = key.rpartition(".")
        ranges |= {key: value} if isinstance(value, list) else {outer: {**ranges.get(outer, {}), name: value}}
    return ranges


def _drawn(asked: optuna.trial.BaseTrial, key: str, suggestions: Value) -> Value:
    """A value from a list or a range. Floats are rounded to three digits, so that people can read and copy them."""
    try:
        if isinstance(suggestions, list):
            # Optuna gets the value's index, because it cannot store tables.
            return suggestions[asked.suggest_categorical(key, range(len(suggestions)))]
        if isinstance(suggestions["low"], int) and isinstance(suggestions["high"], int):
            return asked.suggest_int(key, **suggestions)
        return float(f"{asked.suggest_float(key, **suggestions):.3g}")
    except (KeyError, TypeError, ValueError):
        raise RayflError(
            f"tune.{key}={shown(suggestions)} is not allowed; give {{low = ..., high = ...}}, with log = true or a "
            "step if wanted, or a list of values"
        ) from None


def tune(tuning: Tuning, budget: int, directory: Path | None, audience: console.Audience) -> int:
    """Run `budget` trials of each case into `directory` (None: the next free one), or go on with them. Draw a page of
    all trials, write the experiment with the best values, and print both paths; returns the exit code.

    Raise RayflError, before anything is written, if a case cannot run or if another process tunes there, and at the end
    if no trial of a case has a value. A failure of the machine, Ray or the disk ends the tuning: the trial would not be
    worse, and the tuning would choose other values.
    """
    audience.display.stage("checking the experiments")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    experiments = [tuning.trial(label, {}).experiment for label in tuning.cases]
    known, *_ = [prepare.prepare(experiment).metric_facts for experiment in experiments]
    options = experiments[0].report
    metric = options.metric or comparable.default_metric(known, experiments[0].evaluation.own)
    goal = metric, comparable.comparable(known).get(metric, facts.LOSS).sign, options.last
    named = run_folder.RunFolder.at(None, experiments[0].output.directory, f"{tuning.name}-tune")
    home = directory or named.next_free().directory
    studies = {label: _study(tuning, label, budget) for label in tuning.cases}
    supervision.tell_parent(again=f"go on with --dir {home}")
    with disk.locked(home), sweep.one_session(experiments, audience):
        if code := _play_trials(tuning, studies, budget, goal, home, audience):
            return code
        audience.display.stage(single.DRAWING)
        note = _write(tuning, studies, metric, options, home)
    audience.display.close()
    _print_values(studies, metric, goal[1])
    display.say(f"{note}\ntrials: {home / sweep.PAGE}\nbest:   {home / BEST}, for rayfl run")
    return 0


def _play_trials(
    tuning: Tuning,
    studies: Mapping[str, optuna.Study],
    budget: int,
    goal: tuple[str, int, int],
    home: Path,
    audience: console.Audience,
) -> int:
    """Play all trials. Return 0, or the exit code of a stop or a failure, which a sentence has reported."""
    overall = display.Overall(audience.display, budget * len(studies))
    with supervision.stoppable(overall.stopping) as stopping:
        for label, study in studies.items():
            for _ in range(len(study.trials) or budget):
                stream = None
                try:
                    if not stopping() and _play_trial(tuning, label, study, goal, home, audience):
                        overall.over()
                        continue
                    words, code = audience.stopped(tuning.trial(label, {}).experiment.runtime.limit_s)
                except Exception as error:  # noqa: BLE001 (whatever it is, the trial is not worse for it)
                    words, code = failures.sentence_and_code(error)
                    (failed,) = study.get_trials(states=[TrialState.RUNNING])
                    words, stream = f"rayfl: {failed.user_attrs['title']}: {words}; the tuning has ended", sys.stderr
                audience.display.close()
                display.say(f"{words}; go on with --dir {home}", stream)
                return code
    return 0


def _print_values(studies: Mapping[str, optuna.Study], metric: str, sign: int) -> None:
    """Print the trials without a value, and the best value of each study."""
    for label, study in studies.items():
        for number, trial in enumerate(study.trials, 1):
            if why := trial.user_attrs.get("error"):
                ended = "failed" if trial.state is TrialState.FAIL else "diverged"
                display.say(f"trial {number}, {trial.user_attrs['title']}: {ended}: {why}")
        display.say(f"best of {label}: {metric} {sign * study.best_value:g}, {study.best_trial.user_attrs['title']}")


def _study(tuning: Tuning, label: str, budget: int) -> optuna.Study:
    """The study of a case. If only lists are tuned, their combinations are queued in an order drawn from the seed."""
    pruners = {
        "median": optuna.pruners.MedianPruner(),
        "asha": optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
        "none": optuna.pruners.NopPruner(),
    }
    options = tuning.options
    ranges = tuning.ranges[label]
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=options.seed), pruner=pruners[options.pruner], direction="maximize"
    )
    grid = [
        *itertools.product(
            *(range(len(suggestions)) if isinstance(suggestions, list) else () for suggestions in ranges.values())
        )
    ]
    for index in np.random.default_rng(options.seed).permutation(len(grid))[:budget]:
        study.enqueue_trial(dict(zip(ranges, grid[index], strict=True)))
    return study


def _play_trial(
    tuning: Tuning, label: str, study: optuna.Study, goal: tuple[str, int, int], home: Path, audience: console.Audience
) -> bool:
    """Run the next trial of a study, or the rest of it, and tell the study the result. False if it was stopped.

    goal: a metric; 1, or -1 if smaller values are better; and the number of last evaluations whose mean counts.
    """
    asked = study.ask()
    pruned = Event()
    seen = set[int]()
    metric, sign, last = goal
    values = tuning.values(label, asked)
    asked.set_user_attr("title", tuning.title(label, values))
    try:
        combination = tuning.trial(label, values)
    except RayflError as error:
        return _valueless(study, asked, str(error))
    directory = home / combination.directory

    def see(values: Iterable[tuple[int, float | None]]) -> None:
        # A run that continues from a checkpoint reports some rounds again.
        for round_number, value in values:
            if value is not None and round_number not in seen and not pruned.is_set():
                seen.add(round_number)
                asked.report(sign * value, len(seen))
                if round_number + 1 < combination.experiment.rounds and asked.should_prune():
                    pruned.set()

    run = resuming.earlier_run(directory, combination.experiment, "name another --dir")
    if run is not None:
        see(zip(*(series.series(run, metric) or ((), ())), strict=True))
    if run is None or not (run.finished or pruned.is_set()):
        if not audience.display.hidden:
            display.say(f"trial {asked.number + 1}: {combination.title}")
        watched = replace(
            audience,
            on_round=lambda row, means: see([(row.round, means.get(metric))]),
            stopping=lambda: pruned.is_set() or audience.stopping(),
        )
        try:
            run = sweep.played(combination, directory, False, watched)
        except Diverged as error:
            return _valueless(study, asked, str(error), diverged=True)
        except (ClientError, RayflError) as error:
            if _is_of_surroundings(error, combination.experiment):
                raise
            return _valueless(study, asked, str(error))
    asked.set_user_attr("run", directory)
    if pruned.is_set():
        study.tell(asked, state=TrialState.PRUNED)
    elif run.finished:
        value = groups.last_mean(run, metric, last)
        if not np.isfinite(value):
            return _valueless(study, asked, f"{metric} is {value:g}, or not recorded", diverged=True)
        study.tell(asked, sign * value)
    return run.finished or pruned.is_set()


def _is_of_surroundings(error: Exception, experiment: Experiment) -> bool:
    """Whether a run of the experiment failed for the machine's sake, such as a held lock, and may succeed later."""
    if not isinstance(error, RayflError):
        return out_of_memory(error)
    try:
        prepare.prepare(experiment)
    except RayflError:
        return False
    return True


def _valueless(study: optuna.Study, asked: optuna.Trial, error: str, diverged: bool = False) -> bool:
    """Tell the study that a trial has no value: the worst if it diverged, else nothing is learned. Returns True."""
    asked.set_user_attr("error", error)
    study.tell(asked, -np.inf if diverged else None, None if diverged else TrialState.FAIL)
    return True


def _write(
    tuning: Tuning,
    studies: Mapping[str, optuna.Study],
    metric: str,
    options: report_options.ReportOptions,
    home: Path,
) -> str:
    """Draw the page of all trials, and write the experiment with the best values; returns the note in both."""
    runs = dict[Path, int]()
    for label, study in studies.items():
        if not any((trial.value or 0) > -np.inf for trial in study.get_trials(states=[TrialState.COMPLETE])):
            why = next(
                (trial.user_attrs["error"] for trial in study.trials if "error" in trial.user_attrs), "all were ended"
            )
            raise RayflError(f"no trial of {label} has a value of {metric}: {why}")
        directories = [trial.user_attrs["run"] for trial in study.trials if "run" in trial.user_attrs]
        runs |= {directory: len(record.read_run(directory).rounds) for directory in directories}
    counts = ", ".join(f"{len(study.trials)} of {label}" for label, study in studies.items())
    wrong = [trial.state for study in studies.values() for trial in study.trials if "error" in trial.user_attrs]
    failed = wrong.count(TrialState.FAIL)
    note = (
        f"Tuned by rayfl tune: {', '.join(dict.fromkeys(itertools.chain(*tuning.ranges.values())))} by {metric} on "
        f"validation data of seed {tuning.options.seed}, pruner {tuning.options.pruner}, {sum(runs.values())} rounds; "
        f"trials: {counts}" + f"; {len(wrong) - failed} diverged, {failed} failed" * bool(wrong) + "."
    )
    single.draw(home, [*runs], sweep.PAGE, options.model_copy(update={"note": note, "metric": metric}), True)
    disk.write_text(home / BEST, f"# {note}\n\n{tuning.best(studies, note)}")
    return note
