"""Which groups a comparison shows: of those that differ only in a tuned setting, the best one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rayfl.experiment.identity import lies_in
from rayfl.experiment.report_options import ReportOptions
from rayfl.report import wording
from rayfl.report.colors import key
from rayfl.report.groups import Group, facts_of, in_words, rank_value, ranked_names, smoothed


class TunedGroups(NamedTuple):
    """`grid`: the groups that differ only in the tuned settings, ordered by value. `winner`: the best of them."""

    winner: Group
    grid: tuple[Group, ...]


def compared(found: Sequence[Group], options: ReportOptions) -> tuple[list[Group], list[str], list[TunedGroups]]:
    """The groups that a comparison shows, the best first; the metrics, of which the first one decides; and the
    choices by which tuned groups were left out.

    Seeds without any evaluation are left out, unless their group has no other. Equal groups are sorted by their labels.
    """
    measured = [tuple(run for run in group.runs if run.metrics.num_rows) for group in found]
    found = [group._replace(runs=runs or group.runs) for group, runs in zip(found, measured, strict=True)]
    names = ranked_names(found, options.metric)
    choices = choose(found, options.best_over, names[0], options.last) if names and options.best_over else []
    shown = [choice.winner for choice in choices] or found
    if names:
        facts = facts_of(found, names[0])
        shown = sorted(shown, key=lambda one: (-rank_value(smoothed(one, names[0], options.last), facts), one.label))
    return shown, names, choices


def choose(found: Sequence[Group], tuned: Sequence[str], name: str, last: int) -> list[TunedGroups]:
    """Of the groups that agree in all settings but `tuned`, choose the best mean of the last evaluations of `name`.

    If groups tie or none has a value, the smallest tuned value wins, or else the first group.
    """
    families: dict[str, list[Group]] = {}
    for group in found:
        rest = {key: value for key, value in group.settings.items() if not any(lies_in(key, one) for one in tuned)}
        families.setdefault(repr(sorted(rest.items())), []).append(group)
    choices, facts = [], facts_of(found, name)
    for family in families.values():
        # Numbers by size; other values keep their order.
        grid = sorted(family, key=lambda one: [_place(setting(one.settings, key)) for key in tuned])
        best = max(grid, key=lambda group: rank_value(smoothed(group, name, last), facts))
        choices.append(TunedGroups(best, tuple(grid)))
    return choices


def _place(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def setting(settings: Mapping[str, object], name: str) -> object:
    """The value of one setting of those by dotted key; for a table, its settings as text."""
    found = {key: value for key, value in settings.items() if lies_in(key, name)}
    if set(found) == {name}:
        return found[name]
    words = [f"{key.removeprefix(name + '.')} {wording.value(value)}" for key, value in found.items()]
    return ", ".join(words) or wording.NONE


def tuning(choices: Sequence[TunedGroups], tuned: Sequence[str], name: str, last: int, styles: Sequence[Group]) -> dict:
    """Return the table of the values that were tried and of the winners.

    `styles`: all groups as the page lists them; the position decides the colour.
    """
    place, facts = {id(group): number for number, group in enumerate(styles)}, facts_of(styles, name)
    rows = []
    for choice in sorted(choices, key=lambda choice: place[id(choice.winner)]):
        tried = [
            f"{', '.join(wording.value(setting(group.settings, one)) for one in tuned)}: "
            f"{in_words(smoothed(group, name, last), facts)}{' *' * (group is choice.winner)}"
            for group in choice.grid
        ]
        cells = [*(_cell(choice, one) for one in tuned), "\n".join(tried)]
        rows.append((key(choice.winner.label, place[id(choice.winner)]), cells))
    return {
        "head": ["Run", *(f"Best {one}" for one in tuned), "All that were tried (* the best)"],
        "rows": rows,
        "settings": tuned,
        "metric": wording.title(name, facts),
        "last": last,
    }


def _cell(choice: TunedGroups, name: str) -> str:
    """The winning value, and whether the best value may lie beyond the values that were tried."""
    value, tried = setting(choice.winner.settings, name), [setting(group.settings, name) for group in choice.grid]
    numbers = {one for one in tried if isinstance(one, int | float) and not isinstance(one, bool)}
    edge = ""
    if len(numbers) > 1 and value in (min(numbers), max(numbers)):
        edge = f", the {'smallest' if value == min(numbers) else 'largest'} tried"
    return wording.value(value) + edge
