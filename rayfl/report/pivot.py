"""Tables of numbers by the items of one or two swept settings, with paired differences to a baseline."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.identity import determining_settings, require_settings, swept_items
from rayfl.experiment.report_options import ReportOptions, TableOptions
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.groups import Group, compared, over, setting
from rayfl.report.numbers import number
from rayfl.report.page_tables import TextTable, differing
from rayfl.report.statistics import LEVEL, Ranked, holm, paired, ranked, signed_rank
from rayfl.run_directory.record import read_refused
from rayfl.untyped import Foreign

FEWEST_NUMBERS = 3
"""The fewest numbers of an axis against which a chart is drawn."""
REFUSED = "refused"
"""The cell of a combination that the sweep could not run."""
_MEAN = f"mean {wording.PLUS_MINUS} sd"
_MARKS = {"": "{}", "best": "\1{}\2", "worst": "\3{}\4"}
"""How `Pivot.text` marks a cell; each format writes these control characters in its own way."""
_PLAIN = {1: "", 2: " (best)", 3: "", 4: " (worst)"}
_MARKDOWN = {1: "**", 2: "**", 3: "*", 4: "*", **{ord(letter): f"\\{letter}" for letter in "\\|*_<`["}}
_LATEX = {1: r"\textbf{", 2: "}", 3: r"\underline{", 4: "}", 0xB1: r"$\pm$", 0x2212: "$-$", 60: "$<$", 62: "$>$"}
"""What LaTeX has for the marks, and for plus-minus, minus, < and >, which pandas does not escape."""


class Ranks(NamedTuple):
    """Methods compared over data sets by the number called `title`: `compared`, a rank for each of `methods`.

    left_out: how many data sets lack the number of a method.
    """

    title: str
    methods: Sequence[str]
    compared: Ranked
    left_out: int

    @property
    def note(self) -> str:
        """The tests' results, in sentences."""
        _, p, critical, num_data = self.compared
        sentences = {
            f"Data sets on which a method lacks the number are left out: {self.left_out}.": self.left_out > 0,
            f"{wording.counted(num_data, 'data set')} with the number of every method: too few to compare methods over "
            "data sets.": num_data < 2,
            f"Average ranks over {num_data} data sets (1: the best; methods that tie share their ranks). p of "
            f"{'Friedman' if critical else 'Wilcoxon'}'s test that all methods are alike: {p:.2g}.": num_data > 1,
            f"So few data sets cannot give p at most {LEVEL:g}, or ranks that differ enough; use more data sets.": (
                num_data > 1 and self.compared.is_too_few
            ),
            f"Nemenyi's critical difference of average ranks, at the level {LEVEL:g}: {critical:.2f}.": critical > 0,
        }
        return " ".join(sentence for sentence, holds in sentences.items() if holds)

    @property
    def frame(self) -> pd.DataFrame:
        """A row per method, the best first: its average rank, and the methods from which the tests tell it apart."""
        apart = [", ".join(np.array(self.methods)[row]) or wording.NONE for row in self.compared.differs]
        columns = {"Method": self.methods, "Average rank": self.compared.ranks, "Differs from": apart}
        return pd.DataFrame(columns).sort_values("Average rank", kind="stable", ignore_index=True)

    @property
    def table(self) -> TextTable:
        """`frame` as text, with the note."""
        rows = [[name, f"{rank:.2f}", apart] for name, rank, apart in self.frame.to_numpy()]
        return TextTable([*self.frame], rows, self.note, self.title)


@dataclass(frozen=True)
class Pivot:
    """A table of numbers, whose facts are `facts` by name, by the items of its `options`' rows and columns.

    frame: a row per row, column ("" where there are none) and number: mean, deviation and count over the seeds; the
    paired difference to the baseline, with the other fields of `statistics.Paired`, wilcoxon (p of `signed_rank`),
    p_holm and wilcoxon_holm (adjusted for the rows of the column) and mark ("best", "worst" or ""). What is shown in
    percent is a share of 1 there. unfinished: the number of runs that have not finished. ranks: for each number that is
    to rise or to fall, the items of one axis compared over those of the other, if each of these is another data set.
    refused: why the sweep could not run a cell, by row and column.
    """

    options: TableOptions
    facts: Mapping[str, Facts]
    frame: pd.DataFrame
    unfinished: int = 0
    ranks: Sequence[Ranks] = ()
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """ "Accuracy: own, %, by method and alpha"."""
        numbers = map(wording.axis_title, self.facts.values())
        axes = (self.options.rows, self.options.columns)
        return f"{'; '.join(numbers)}, by {' and '.join(short(axis) for axis in axes if axis)}"

    @property
    def note(self) -> str:
        """What the table shows, in sentences."""
        most = max(self.frame["count"])
        base = self.options.baseline
        pairs = max(self.frame["num_pairs"])
        sentences = {
            f"Mean {wording.PLUS_MINUS} standard deviation over {most} seeds.": most > 1,
            f"vs {base}: mean difference of runs with the same seed [its 95 % interval by Student's t]. p: of the "
            "paired t-test, Wilcoxon: of his signed-rank test, each after Holm's correction over the rows. detectable: "
            "the smallest true difference that the t-test finds in 80 % of such experiments.": base is not None,
            f"Wilcoxon's p of {pairs} pairs is at least {2.0 ** (1 - pairs):.2g}, never below {LEVEL:g}: use more "
            "seeds.": pairs > 0 and 2.0 ** (1 - pairs) > LEVEL,
            f"Runs that have not finished, and count as far as they came: {self.unfinished}.": self.unfinished > 0,
            f"{REFUSED}: the sweep could not run it.": bool(self.refused),
            "Best, worst: the 95 % interval of the paired difference to the next one in the column excludes 0.": any(
                self.frame["mark"]
            ),
        }
        return " ".join(sentence for sentence, holds in sentences.items() if holds)

    @property
    def text(self) -> pd.DataFrame:
        """The table as text, with headings of two levels and `_MARKS`."""
        table = {(short(self.options.rows), ""): [*dict.fromkeys(self.frame["row"])]}
        # pandas does not say that the keys of several columns are tuples.
        columns: Foreign = self.frame.groupby(["column", "number"], sort=False)
        for (column, number_name), cells in columns:
            facts = self.facts[number_name]
            title = wording.axis_title(facts) * (len(self.facts) > 1 or not column)
            head = ": ".join(filter(None, [item_title(self.options.columns, column), title]))
            table |= {(head, part): words for part, words in self._parts(cells, facts).items()}
        return pd.DataFrame(table)

    def _parts(self, cells: pd.DataFrame, facts: Facts) -> dict[str, list[str]]:
        """A column's cells in words: the means, and the parts of the differences if it has any, by their headings."""
        scale = 100 if facts.is_percent else 1
        size = np.nanmax([0, *np.abs(cells["mean"])])
        decimals = min(max(3 - math.floor(math.log10(size)), 0), 6) if 0 < size < math.inf and scale == 1 else 2
        is_refused = [place in self.refused for place in zip(cells["row"], cells["column"], strict=True)]
        uneven = cells["count"][~np.array(is_refused)].nunique() > 1

        def words(value: float, sign: str = "") -> str:
            return wording.NONE if math.isnan(value) else f"{scale * value:{sign},.{decimals}f}"

        means = [
            REFUSED
            if refused
            else _MARKS[mark].format(
                words(mean) + f" {wording.PLUS_MINUS} {words(sd)}" * (n > 1) + f" ({n})" * (uneven and n > 0)
            )
            for refused, mean, sd, n, mark in zip(
                is_refused, *(cells[name] for name in ("mean", "deviation", "count", "mark")), strict=True
            )
        ]
        if self.options.baseline is None:
            return {"": means}
        more = {
            f"vs {self.options.baseline}": [
                words(mean, "+") + f" [{words(low, '+')}, {words(high, '+')}]" * (not math.isnan(low))
                for mean, low, high in zip(cells["difference"], cells["low"], cells["high"], strict=True)
            ],
            **{
                head: [wording.NONE if math.isnan(p) else f"{p:.2g}" for p in cells[name]]
                for head, name in (("p", "p_holm"), ("Wilcoxon", "wilcoxon_holm"))
            },
            "detectable": [*map(words, cells["detectable"])],
        }
        return {_MEAN: means, **(more if any(cells["num_pairs"]) else {})}

    def flat(self, written: Mapping[int, str] = _PLAIN) -> pd.DataFrame:
        """`text` with headings of one level; parts of differences follow the mean, without its heading.

        written: what is written for a character, by its code.
        """
        heads = [upper if lower in ("", _MEAN) else lower for upper, lower in self.text.columns]
        columns = pd.Index([head.translate(written) for head in heads])
        return self.text.set_axis(columns, axis=1).map(lambda cell: cell.translate(written))

    @property
    def table(self) -> TextTable:
        """The table as plain text, with its title and note."""
        return TextTable([*self.flat()], self.flat().to_numpy().tolist(), self.note, self.title)

    def __str__(self) -> str:
        ranks = [f"\n{ranks.frame.to_string(index=False)}\n{ranks.note}" for ranks in self.ranks]
        return "\n".join([self.title, self.flat().to_string(index=False), self.note, *ranks])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<p>{escape(self.title)}</p>{self.flat().to_html(index=False)}<p>{escape(self.note)}</p>"

    def to_csv(self) -> str:
        """`frame` as CSV."""
        return self.frame.to_csv(index=False)

    def to_markdown(self) -> str:
        """The table in Markdown, the best of a column bold and the worst in italics."""
        flat = self.flat(_MARKDOWN)
        return "".join(f"| {' | '.join(row)} |\n" for row in (flat, ["---"] * flat.shape[1], *flat.to_numpy().tolist()))

    def to_latex(self) -> str:
        """The table in LaTeX, for the package booktabs, the best of a column bold and the worst underlined."""
        return latex(self.text if self.options.baseline is not None else self.text.droplevel(1, axis=1))


def latex(text: pd.DataFrame) -> str:
    """A `tabular` for the package booktabs of a table of text."""
    columns = "l" + "r" * (text.shape[1] - 1)
    written = text.to_latex(index=False, escape=True, column_format=columns, multicolumn_format="c")
    return re.sub(r"(?<![\w.-])-(?=\d)", "\u2212", written).translate(_LATEX)


def short(axis: Sequence[str]) -> str:
    """The name of an axis: "lr" for method.lr."""
    return ", ".join(key.rpartition(".")[2] for key in axis)


def item_title(axis: Sequence[str], item: str) -> str:
    """ "lr = 0.1" for a number, else the item."""
    return item if math.isnan(as_number(item)) else f"{short(axis)} = {item}"


def as_number(item: str) -> float:
    """The number that an item of an axis is; NaN if it is none."""
    return float(item) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", item) else math.nan


def pivots(every: Sequence[Group], options: ReportOptions) -> list[Pivot]:
    """The tables of `[report]`, or those that fit the sweep. Raise RayflError as `pivot` does."""
    groups, names, _ = compared(every, options)
    tables = options.tables or (default_tables(groups, options.best_over) if names else [])
    return [pivot(groups, table, names[0] if names else None, options.last) for table in tables]


def tables_or_problems(groups: Sequence[Group], options: ReportOptions) -> tuple[list[Pivot], list[str]]:
    """The tables of several runs by swept settings, and why others are left out: runs may have failed."""
    tables: list[Pivot] = []
    problems: list[str] = []
    several = sum(len(group.runs) for group in groups) > 1
    for chosen in ([(table,) for table in options.tables] or [()]) * several:
        try:
            tables += pivots(groups, options.model_copy(update={"tables": chosen}))
        except RayflError as error:
            problems.append(str(error))
    return tables, problems


def default_tables(groups: Sequence[Group], tuned: Sequence[str]) -> list[TableOptions]:
    """A table by the two swept settings, or one for each swept setting with at least three numbers."""
    swept = pd.DataFrame([swept_items(group.runs[0].experiment) for group in groups])
    items = {str(key): [*swept[key].dropna().unique()] for key in swept}
    axes = [key for key, some in items.items() if len(some) > 1 and key not in tuned]
    if len(axes) == 2:
        return [TableOptions(rows=(axes[0],), columns=(axes[1],))]
    numeric = [key for key in axes if np.isfinite([*map(as_number, items[key])]).sum() >= FEWEST_NUMBERS]
    if len(axes) == 1:
        return [TableOptions(rows=(key,)) for key in numeric]
    return [TableOptions(rows=tuple(other for other in axes if other != key), columns=(key,)) for key in numeric]


def pivot(groups: Sequence[Group], options: TableOptions, metric: str | None, last: int) -> Pivot:
    """Make a table of groups. metric: the one that ranks them, which is shown if the options name no values.

    Raise RayflError if no run has an axis, a number or the baseline, or if the runs of a cell have different settings.
    """
    numbers = [number(name, groups, metric, last) for name in options.values or [metric or ""]]
    placed = _placed(groups, options)
    refused = {
        cell: why
        for label, swept, why in read_refused(run.directory for group in groups for run in group.runs)
        if (cell := _cell(label, {"swept": swept}, options)) not in placed
    }
    base = options.baseline
    # Numbers by size; then the others, in the order of the groups.
    rows, columns = (
        sorted(dict.fromkeys(items), key=lambda item: (math.isnan(as_number(item)), np.nan_to_num(as_number(item))))
        for items in zip(*placed, *refused, strict=True)
    )
    _require_baseline(base, [*rows, *columns])
    # A row per seed.
    values = pd.DataFrame(
        {
            (column, shown.name, row): {run.experiment.get("seed"): shown.read(run) for run in group.runs}
            for shown in numbers
            for (row, column), group in placed.items()
        }
    )
    records = []
    for column, shown in product(columns, numbers):
        keys = [(column, shown.name, row) for row in rows]
        bases = [(column, shown.name, base) if base in rows else (base, shown.name, row) for row in rows]
        values_of_rows, others = (
            values.reindex(columns=pd.MultiIndex.from_tuples(every)).to_numpy().T for every in (keys, bases)
        )
        differences = values_of_rows - others
        differences[[key == other for key, other in zip(keys, bases, strict=True)]] = np.nan
        pairs = [*map(paired, differences)]
        tests = [*map(signed_rank, differences)]
        adjusted = zip(holm([pair.p for pair in pairs]), tests, holm(tests), strict=True)
        marks = _marks(
            {key[2]: line for key, line in zip(keys, values_of_rows, strict=True) if key in values}, shown.facts
        )
        records += [
            {"row": row, "column": column, "number": shown.name, **vars(over(line)), "difference": pair.mean}
            | dict(zip(pair._fields[1:], pair[1:], strict=True))
            | {**dict(zip(("p_holm", "wilcoxon", "wilcoxon_holm"), p, strict=True)), "mark": marks.get(row, "")}
            for row, line, pair, p in zip(rows, values_of_rows, pairs, adjusted, strict=True)
        ]
    ranks = [
        ranks
        for shown in numbers
        if shown.facts.higher_is_better is not None
        and (ranks := _ranks(shown.facts, values.mean().xs(shown.name, level=1).unstack(), placed))
    ]
    unfinished = sum(not run.finished for group in groups for run in group.runs)
    return Pivot(
        options, {shown.name: shown.facts for shown in numbers}, pd.DataFrame(records), unfinished, ranks, refused
    )


def _ranks(facts: Facts, means: pd.DataFrame, placed: Mapping[tuple[str, str], Group]) -> Ranks | None:
    """Ranks of the items of one axis over those of the other, which are data sets: groups have the same settings of
    `[data]` and `[partition]` if, and only if, they have the same item. None if no axis is so, or with one method.

    means: over seeds, [columns, rows] of the table.
    """
    for axis, table in ((1, means), (0, means.T)):
        known = {
            (cell[axis], repr([item for item in group.settings.items() if item[0].startswith(("data", "partition"))]))
            for cell, group in placed.items()
        }
        items, data = ({pair[side] for pair in known} for side in (0, 1))
        if len(items) == len(data) == len(known) > 1 < len(table.columns):
            compared = ranked(facts.sign * table.to_numpy())
            return Ranks(facts.title, [*table.columns], compared, len(table) - compared.num_data)
    return None


def check_tables(tables: Sequence[TableOptions], experiments: Sequence[Mapping[str, object]]) -> None:
    """Raise RayflError if a table of `[report]` has an axis or a baseline that no experiment of its sweep has.

    Labels are known only after the runs.
    """
    for options in tables:
        require_settings(experiments, [*options.rows, *options.columns])
        if "label" not in (*options.rows, *options.columns):
            axes = product((options.rows, options.columns), experiments)
            _require_baseline(options.baseline, [_item("", table, axis) for axis, table in axes])


def _require_baseline(base: str | None, items: Sequence[str]) -> None:
    if base not in (None, *items):
        raise RayflError(f"no row or column is {base!r}; {did_you_mean(str(base), dict.fromkeys(filter(None, items)))}")


def _placed(groups: Sequence[Group], options: TableOptions) -> dict[tuple[str, str], Group]:
    """The groups by their rows and columns. Raise RayflError as `pivot` does."""
    require_settings([run.experiment for group in groups for run in group.runs], [*options.rows, *options.columns])
    placed: dict[tuple[str, str], Group] = {}
    for group in groups:
        row, column = _cell(group.label, group.runs[0].experiment, options)
        if (other := placed.setdefault((row, column), group)) is not group:
            where = ", ".join(filter(None, (row, column)))
            keys = [key for key, _ in differing([group.settings, other.settings])] or ["their directories alone"]
            raise RayflError(
                f"the runs of {where!r} differ in {', '.join(keys[:3])}: add a setting to the "
                "rows or columns, as in case,method.lr, or show its best value (best_over, --best-over)"
            )
    return placed


def _cell(label: str, experiment: Mapping[str, object], options: TableOptions) -> tuple[str, str]:
    """The row and the column of an experiment."""
    return _item(label, experiment, options.rows), _item(label, experiment, options.columns)


def _item(label: str, experiment: Mapping[str, object], axis: Sequence[str]) -> str:
    """An experiment's item of an axis as its sweep calls it, else the value of the setting."""
    words = {"label": label, **swept_items(experiment)}
    settings = determining_settings(experiment)
    return ", ".join(words.get(key) or wording.value(setting(settings, key)) for key in axis)


def _marks(values: Mapping[str, np.ndarray], facts: Facts) -> dict[str, str]:
    """The best and the worst row of values per seed, each only if the 95 % interval of its paired difference to the
    next row excludes 0. Empty if neither high nor low values are better, or if a seed lacks a value."""
    order = sorted(values, key=lambda row: -facts.sign * values[row].mean())
    if facts.higher_is_better is None or len(order) < 2 or np.isnan([*values.values()]).any():
        return {}
    ends = {"best": order[:2], "worst": order[:-3:-1]}
    pairs = {mark: paired(values[end] - values[other]) for mark, (end, other) in ends.items()}
    return {ends[mark][0]: mark for mark, pair in pairs.items() if pair.low > 0 or pair.high < 0}
