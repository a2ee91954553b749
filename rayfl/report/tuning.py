"""Each method at its best: of the groups that differ only in a tuned setting, the one with the best final accuracy."""

from collections.abc import Sequence
from typing import NamedTuple

from rayfl.experiment.identity import determining_settings, lies_in
from rayfl.report import wording
from rayfl.report.colors import key
from rayfl.report.scores import percent, rank_value, smoothed
from rayfl.report.series import Group


class Choice(NamedTuple):
    """`grid`: the groups that differ only in the tuned settings, ordered by value. `winner`: the best of them."""

    winner: Group
    grid: tuple[Group, ...]


def choose(found: Sequence[Group], tuned: Sequence[str], name: str, last: int) -> list[Choice]:
    """Of the groups that agree in all settings but `tuned`, choose the highest mean of the last evaluations of `name`.

    If groups tie or none has a value, the smallest tuned value wins, or else the first group.
    """
    families: dict[str, list[Group]] = {}
    for group in found:
        rest = {key: value for key, value in _settings(group).items() if not any(lies_in(key, one) for one in tuned)}
        families.setdefault(repr(sorted(rest.items())), []).append(group)
    choices = []
    for family in families.values():
        grid = sorted(family, key=lambda group: _order(group, tuned))
        choices.append(Choice(max(grid, key=lambda group: rank_value(smoothed(group, name, last))), tuple(grid)))
    return choices


def _settings(group: Group) -> dict[str, object]:
    return determining_settings(group.runs[0].experiment)


def _value(group: Group, name: str) -> object:
    """The value of one setting; for a table, its settings as text."""
    found = {key: value for key, value in _settings(group).items() if lies_in(key, name)}
    if set(found) == {name}:
        return found[name]
    words = [f"{key.removeprefix(name + '.')} {wording.value(value)}" for key, value in found.items()]
    return ", ".join(words) or wording.NONE


def _order(group: Group, tuned: Sequence[str]) -> list[float]:
    """Sorts numbers by size; other values keep their order."""
    return [float(value) if isinstance(value := _value(group, name), int | float) else 0.0 for name in tuned]


def tuning(choices: Sequence[Choice], tuned: Sequence[str], name: str, last: int, styles: Sequence[Group]) -> dict:
    """Return the table of the values that were tried and of the winners.

    `styles`: all groups as the page lists them; the position decides the colour.
    """
    place = {id(group): number for number, group in enumerate(styles)}
    rows = []
    for choice in sorted(choices, key=lambda choice: place[id(choice.winner)]):
        tried = [
            f"{_tried(group, tuned)}: {percent(smoothed(group, name, last))}{' *' * (group is choice.winner)}"
            for group in choice.grid
        ]
        cells = [*(_cell(choice, one) for one in tuned), "\n".join(tried)]
        rows.append((key(choice.winner.label, place[id(choice.winner)]), cells))
    head = ["Run", *(f"Best {one}" for one in tuned), "All that were tried (* the best)"]
    return {"head": head, "rows": rows, "settings": tuned, "metric": wording.title(name), "last": last}


def _tried(group: Group, tuned: Sequence[str]) -> str:
    return ", ".join(wording.value(_value(group, one)) for one in tuned)


def _cell(choice: Choice, name: str) -> str:
    """The winning value, and whether the best value may lie beyond the values that were tried."""
    value, tried = _value(choice.winner, name), [_value(group, name) for group in choice.grid]
    numbers = {one for one in tried if isinstance(one, int | float) and not isinstance(one, bool)}
    edge = ""
    if len(numbers) > 1 and value in (min(numbers), max(numbers)):
        edge = f", the {'smallest' if value == min(numbers) else 'largest'} tried"
    return wording.value(value) + edge
