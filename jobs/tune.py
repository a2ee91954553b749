"""Tune an experiment under a budget: trials by Optuna, each of them a run that is judged on validation data.

    [tune]
    seed = 100
    method.lr = {low = 0.001, high = 1.0, log = true}       # whole numbers if both ends are
    method.mu = [0.1, 1.0, 10.0]

All trials have the seed of `[tune]` and `evaluation.split` "validation", so that no test sample decides anything. Each
case of a `[sweep]` is tuned by itself; a `[[sweep.case]]` may have a table `tune` of its own, which adds to the other.
Optuna stores nothing: a tune that goes on asks it for the same trials again and answers from the runs in the directory.
As its sampler is seeded, it draws the same values.
"""

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
from pydantic import Field

from actors import parent_process, signals
from jobs import earlier_run, run_page, sweep
from jobs.console import Audience
from jobs.display import Overall
from jobs.standard_output import say
from rayfl.errors import RayflError
from rayfl.experiment import identity, input_files, prepare, toml
from rayfl.experiment.report_options import ReportOptions
from rayfl.experiment.sweep import Combination, as_cases, case_of, combine, described
from rayfl.experiment.table import copied, split_override, with_overrides
from rayfl.metrics import facts, fairness
from rayfl.report import groups, series
from rayfl.run_directory import disk, record
from rayfl.run_directory.run_folder import RunFolder
from rayfl.settings import Settings, dotted, shown

try:
    import optuna
except ImportError:
    raise RayflError("tuning needs the package optuna: run `pip install 'rayfl[tune]'`") from None

BEST = "best.toml"
"""The experiment in a tune's directory that has the best values."""
_FIXED = {*identity.NOT_DETERMINING, "runtime", "evaluation", "sweep", "tune"}
"""Tables and settings that do not change how well a model learns."""


class Options(Settings):
    """The settings of the `[tune]` table beside the values to draw from."""

    seed: int = Field(default=100, ge=0, description="the seed of all trials, which is none of the experiment's")
    pruner: Literal["median", "asha", "none"] = Field(
        default="median",
        description="ends a trial at an evaluation: below the median of the others, or by successive halving",
    )


# Any: settings of any type.
class Tuning:
    """What is tuned: a file's `table` without `[tune]` and `[sweep]`, and by label the `cases` of its sweep, as in
    `[[sweep.case]]` ({} if nothing but seeds is swept), with the list or range of each tuned setting by dotted key.

    Settings in `overrides` are not tuned. Raise RayflError if a case, or an end of its ranges, is no valid experiment.
    """

    def __init__(
        self, table: Mapping[str, Any], lists: Mapping[str, list[Any]] | None, overrides: Sequence[str] = ()
    ) -> None:
        self.table, self.overrides, lists = copied(table), overrides, lists or {}
        given = dict(self.table.pop("tune", {}))
        self.options = Options(**{key: given.pop(key) for key in Options.model_fields if key in given})
        self.seeds, self.name = lists.get("seed", [self.table.get("seed", 1)]), self.table["name"]
        if self.options.seed in self.seeds:
            raise RayflError(f"tune.seed={self.options.seed} is a seed of the experiment too; give another one")
        self.cases = {case.get("label", self.name): case for case in as_cases(lists) or [{}]}
        self.ranges = {at: {**_ranges(given), **_ranges(case.pop("tune", {}))} for at, case in self.cases.items()}
        combine(self.table, {"case": [{**case, "label": label} for label, case in self.cases.items()]}, overrides)
        for ranges, one in itertools.product(self.ranges.values(), overrides):
            ranges.pop(".".join(split_override(one)[0]), None)
        for (label, ranges), end in itertools.product(self.ranges.items(), ("low", "high")):
            if not ranges or {key.partition(".")[0] for key in ranges} & _FIXED:
                raise RayflError(
                    f"{', '.join(ranges) or 'nothing'} cannot be tuned; give tune.KEY={{low=..., high=...}} or "
                    "tune.KEY=[VALUE, ...] for a KEY that changes how a model learns"
                )
            # The first and the last of a list.
            ends = {key: of[-(end == "high")] if isinstance(of, list) else of.get(end) for key, of in ranges.items()}
            self.trial(label, ends)

    def values(self, label: str, drawn: optuna.trial.BaseTrial | Mapping[str, Any]) -> dict[str, Any]:
        """The values of a trial by dotted key. `drawn`: a trial that draws them now, or what it has drawn."""
        asked = optuna.trial.FixedTrial(dict(drawn)) if isinstance(drawn, Mapping) else drawn
        return {key: _drawn(asked, key, of) for key, of in self.ranges[label].items()}

    def trial(self, label: str, drawn: optuna.trial.BaseTrial | Mapping[str, Any]) -> Combination:
        """The experiment of a trial, called by its case and its values; see `values`."""
        values = self.values(label, drawn)
        words = [f"{key.rpartition('.')[2]}={described(value)}" for key, value in values.items()]
        values["label"] = ", ".join([label] * bool(self.cases[label]) + words)
        values |= {"seed": self.options.seed, "evaluation.split": "validation"}
        return case_of(self.table, with_overrides(copied(self.cases[label]), (), values)[0], self.overrides)

    def best(self, drawn: Mapping[str, Mapping[str, Any]], note: str) -> str:
        """The experiment file with the best values, by case. `note`: what its page says of them."""
        values = {label: self.values(label, one) for label, one in drawn.items()}
        cases = [with_overrides(copied(case), (), values[at])[0] for at, case in self.cases.items() if case]
        changes = {"report.note": note, **({} if cases else values[self.name])}
        sweep = {"seed": self.seeds if len(self.seeds) > 1 else None, "case": cases or None}
        table = {**with_overrides(copied(self.table), (), changes)[0], "sweep": sweep if any(sweep.values()) else None}
        return toml.dumps(input_files.absolute(table))


# Any: what the user gave.
def _ranges(given: Mapping[str, Any]) -> dict[str, Any]:
    """The lists and ranges of a `[tune]` table by their dotted keys, whether nested or not."""
    found: dict[str, Any] = {}
    for key, value in dotted(given).items():
        table, _, name = key.rpartition(".")
        found |= {key: value} if isinstance(value, list) else {table: {**found.get(table, {}), name: value}}
    return found


# Any: what the user gave.
def _drawn(asked: optuna.trial.BaseTrial, key: str, of: Any) -> Any:
    """A value from a list or a range; of numbers three digits, so that people can read and copy them."""
    try:
        if isinstance(of, list):
            return asked.suggest_categorical(key, of)
        if isinstance(of["low"], int) and isinstance(of["high"], int):
            return asked.suggest_int(key, **of)
        return float(f"{asked.suggest_float(key, **of):.3g}")
    except (KeyError, TypeError, ValueError):
        raise RayflError(
            f"tune.{key}={shown(of)} is not allowed; give {{low = ..., high = ...}}, with log = true or a step if "
            "wanted, or a list of values"
        ) from None


def tune(tuning: Tuning, budget: int, directory: Path | None, audience: Audience) -> int:
    """Run `budget` trials of each case into `directory` (None: the next free one), or go on with them. Draw a page of
    all trials, write the experiment with the best values, and print where they are; returns the exit code.

    Raise RayflError, before anything is written, if a case cannot run, and at the end if all trials of a case failed.
    """
    audience.display.stage("checking the experiments")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    first = {label: optuna.create_study().ask() for label in tuning.cases}
    experiments = [tuning.trial(label, asked).experiment for label, asked in first.items()]
    # What no file can hold, such as an object from Python, is refused here.
    tuning.best({label: asked.params for label, asked in first.items()}, "")
    known, *_ = [prepare.prepare(one).metric_facts for one in experiments]
    options, ranks = experiments[0].report, next((name for name, one in known.items() if one.ranks), "loss")
    metric = options.metric or f"{'own' if experiments[0].evaluation.own else 'pooled'}/{ranks}"
    place, _, what = metric.partition("/")
    goal = metric, fairness.facts_over_clients(place, known.get(what, facts.LOSS)).sign, options.last
    named = RunFolder.named(f"{tuning.name}-tune", experiments[0].output.directory).next_free().directory
    home, studies = directory or named, {label: _study(tuning, label) for label in tuning.cases}
    parent_process.report(again=f"go on with --dir {home}")
    with sweep.one_session(experiments, audience):
        overall = Overall(audience.display, budget * len(studies))
        with signals.stoppable(overall.stopping) as stopping:
            for label, study in studies.items():
                for _ in range(min(budget, len(study.trials) or budget)):
                    if stopping() or not _play_trial(tuning, label, study, goal, home, audience):
                        stopped, code = audience.stopped(experiments[0].runtime.limit_s)
                        audience.display.close()
                        say(f"{stopped}; go on with --dir {home}")
                        return code
                    overall.over()
    audience.display.stage(run_page.DRAWING)
    _write(tuning, studies, metric, options, home)
    audience.display.close()
    say(f"trials: {home / sweep.PAGE}")
    say(f"best: {home / BEST}; run it with: rayfl run {shlex.quote(str(home / BEST))}")
    return 0


def _study(tuning: Tuning, label: str) -> optuna.Study:
    """The study of a case. Of lists alone all combinations wait in it, in an order drawn from the seed."""
    pruners, ranges = optuna.pruners, tuning.ranges[label]
    asha = pruners.SuccessiveHalvingPruner(min_resource=1)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=tuning.options.seed),
        pruner={"median": pruners.MedianPruner(), "asha": asha, "none": pruners.NopPruner()}[tuning.options.pruner],
        direction="maximize",
    )
    grid = [*itertools.product(*(of if isinstance(of, list) else () for of in ranges.values()))]
    for place in np.random.default_rng(tuning.options.seed).permutation(len(grid)):
        study.enqueue_trial(dict(zip(ranges, grid[place], strict=True)))
    return study


def _play_trial(
    tuning: Tuning, label: str, study: optuna.Study, goal: tuple[str, int, int], home: Path, audience: Audience
) -> bool:
    """Play the next trial of a study, or what is left of it, and tell the study how it ended. False if it was stopped.

    goal: a metric; 1, or -1 if less of it is better; and the number of last evaluations whose mean counts.
    """
    asked, pruned, seen, (metric, sign, last) = study.ask(), Event(), set[int](), goal
    one = tuning.trial(label, asked)
    directory = home / one.directory

    def see(values: Iterable[tuple[int, float | None]]) -> None:
        # A run that goes on from a checkpoint reports some rounds again.
        for round, value in values:
            if value is not None and round not in seen and not pruned.is_set():
                seen.add(round)
                asked.report(sign * value, len(seen))
                if round + 1 < one.experiment.rounds and asked.should_prune():
                    pruned.set()

    run = earlier_run.earlier_run(directory, one.experiment, "name another --dir")
    if run is not None:
        see(zip(*(series.series(run, metric) or ((), ())), strict=True))
    if run is None or not (run.finished or pruned.is_set()):
        say(f"[{len(study.trials)}] {one.title}")
        watched = replace(
            audience,
            on_round=lambda row, means: see([(row.round, means.get(metric))]),
            stopping=lambda: pruned.is_set() or audience.stopping(),
        )
        outcome = sweep.attempt(one, directory, False, watched)
        if outcome.status == "failed":
            asked.set_user_attr("error", outcome.error)
            study.tell(asked, -math.inf)
            return True
        run = record.read_run(directory)
    if pruned.is_set():
        study.tell(asked, state=optuna.trial.TrialState.PRUNED)
    elif run.finished:
        value = groups.last_mean(run, metric, last)
        # A model that has diverged is the worst.
        study.tell(asked, sign * value if math.isfinite(value) else -math.inf)
    return run.finished or pruned.is_set()


def _write(
    tuning: Tuning, studies: Mapping[str, optuna.Study], metric: str, options: ReportOptions, home: Path
) -> None:
    """Draw the page of all trials, and write the experiment with the best values."""
    runs, words = dict[Path, int](), list[str]()
    for label, study in studies.items():
        if study.best_value == -math.inf:
            raise RayflError(
                f"no trial of {label} has a {metric}: {study.best_trial.user_attrs.get('error', 'diverged')}"
            )
        places = (home / tuning.trial(label, one.params).directory for one in study.trials)
        played = {one: len(record.read_run(one).rounds) for one in places if record.is_run(one)}
        runs |= played
        words.append(f"{label}: {len(study.trials)} trials, {sum(played.values())} rounds")
    note = (
        f"Tuned by rayfl tune: {', '.join(dict.fromkeys(itertools.chain(*tuning.ranges.values())))} by {metric} on "
        f"validation data of seed {tuning.options.seed}, pruner {tuning.options.pruner}; {'; '.join(words)}."
    )
    shown = options.model_copy(update={"note": note, "metric": metric})
    run_page.draw(home, [*runs], sweep.PAGE, shown, overwrite=True)
    best = tuning.best({label: study.best_params for label, study in studies.items()}, note)
    disk.write_text(home / BEST, f"# {note}\n\n{best}")
