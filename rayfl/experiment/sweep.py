"""Sweep: one file, many experiments. The `[sweep]` table lists values of settings; each combination is an experiment.

    [sweep]
    seed = [0, 1, 2]
    method.lr = [0.01, 0.1]                     # or "method.lr"
    uplink = ["dense", {name = "topk", keep_ratio = 0.1, label = "a tenth"}]

Combinations come in the order of the table, and the last key changes fastest. An item that is a table may have a
`label`, which legends and directories then show. Cases change several settings at once, in any tables:

    [[sweep.case]]
    label = "EF21, top-k"
    method = {name = "ef21", lr = 0.1}          # has a name: replaces the table
    uplink = "topk"
    clients.per_round = 5                       # changes this setting of the table alone
"""

import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayfl.choices import plugins
from rayfl.choices.kinds import Choice
from rayfl.errors import RayflError, UnusedSetting, log
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import lies_in
from rayfl.experiment.table import copied, override, put, read_table, split_override, with_overrides
from rayfl.methods.base import Method
from rayfl.settings import shown
from rayfl.untyped import SettingsTable, Value

_LONGEST_NAME = 120
"""The most letters of a directory's name; a longer one is cut and ends in a digest."""
_SEED = "seed"
_CASE = "case"
MOST_COMBINATIONS = 10_000
"""The most experiments of one sweep; each is validated before the first one starts."""


@dataclass(frozen=True)
class Combination:
    """One experiment of a sweep. title: its swept settings; directory: its name inside the sweep's directory.

    left_out: settings beside `[sweep]` that do nothing in this experiment, by dotted key, each with a message.
    """

    title: str
    directory: str
    experiment: Experiment
    left_out: Mapping[str, RayflError] = field(default_factory=dict)


@dataclass(frozen=True)
class _Item:
    """One value of a swept setting. A case's value is a table of settings by dotted key.

    name: its label, or its value in words; words: the same with the key where the value alone is unclear.
    """

    key: str
    value: Value
    name: str
    words: str

    @property
    def settings(self) -> SettingsTable:
        """The settings that it changes, by dotted key."""
        return self.value if self.key == _CASE else {self.key: self.value}


def read_sweep(file: Path, overrides: Sequence[str] = ()) -> list[Combination] | None:
    """All combinations of a file's sweep, validated; None for a file that describes a single experiment.

    Raise RayflError if the `[sweep]` table is invalid; if a combination is not a valid experiment, the error names it.
    """
    table, lists = with_overrides(read_table(file), overrides)
    return None if lists is None else combine(table, lists, overrides)


def combine(
    table: dict[str, Value], lists: Mapping[str, list[Value]], overrides: Sequence[str] = ()
) -> list[Combination]:
    """All combinations of swept lists by dotted key, validated. Overrides inside a swept table apply to each of them.

    Raise RayflError if there are too many combinations, or if one is not a valid experiment; the error names it.
    """
    if (number := math.prod(len(values) for values in lists.values())) > MOST_COMBINATIONS:
        sizes = " x ".join(str(len(values)) for values in lists.values())
        raise RayflError(
            f"the sweep has {number:,} combinations ({sizes}); give lists of at most {MOST_COMBINATIONS:,} in all"
        )
    swept = _items(lists)
    inside = _inside(overrides, {key for items in swept for item in items for key in item.settings})
    combinations = [_combination(table, items, inside) for items in itertools.product(*swept)]
    for key, times in Counter(key for combination in combinations for key in combination.left_out).items():
        first = next(combination for combination in combinations if key in combination.left_out)
        if times == len(combinations):
            raise RayflError(f"{first.title:.200}: {first.left_out[key]}")
        log.warning(
            "%s does nothing in %d of %d runs, such as %r: left out", key, times, len(combinations), first.title
        )
    for names in (
        [combination.title for combination in combinations],
        [combination.directory for combination in combinations],
    ):
        (name, times), *_ = Counter(names).most_common(1)
        if times > 1:
            raise RayflError(f"two combinations of the sweep are called {name!r}; give each of their items a label")
    return combinations


def case_of(table: dict[str, Value], case: SettingsTable, overrides: Sequence[str]) -> Combination:
    """The experiment of one case; `combine` refuses what does nothing in all cases. Overrides as there."""
    item = _item(_CASE, case, "")
    return _combination(table, [item], _inside(overrides, item.settings))


def as_cases(lists: Mapping[str, list[Value]]) -> list[dict[str, Value]]:
    """All combinations of swept lists, seeds left out, each as a case; [] if nothing else is swept."""
    swept = _items({key: values for key, values in lists.items() if key != _SEED})
    cases = list[dict[str, Value]]()
    for items in itertools.product(*swept) if swept else ():
        cases.append({"label": ", ".join(item.words for item in items)})
        for key, value in _settings(items):
            put(cases[-1], key.split("."), copied(value), key)
    return cases


def _inside(overrides: Sequence[str], keys: Iterable[str]) -> list[str]:
    """The overrides of settings inside swept tables."""
    return [
        override for override in overrides if any(lies_in(".".join(split_override(override)[0]), key) for key in keys)
    ]


def _items(lists: Mapping[str, list[Value]]) -> list[list[_Item]]:
    """The items of each key. If only one key has names or tables, these are shown without `key=`."""
    named = [key for key, values in lists.items() if any(_has_name(value) for value in values)]
    last = [key.rpartition(".")[2] for key in lists]
    items = []
    for key, values in lists.items():
        short = key.rpartition(".")[2]
        prefix = f"{short if last.count(short) == 1 else key}="
        items.append([_item(key, value, "" if named == [key] else prefix) for value in values])
    return items


def _item(key: str, value: Value, prefix: str) -> _Item:
    if key == _CASE and not (isinstance(value, Mapping) and "label" in value):
        raise RayflError(f"sweep.case has {shown(value)}; a case must be a table of settings with a label")
    if not isinstance(value, Mapping):
        return _Item(key, value, described(value), prefix + described(value))
    value = dict(value)
    label = value.pop("label", None)
    if label is not None and (not isinstance(label, str) or not label.strip()):
        raise RayflError(f"sweep.{key} has the label {shown(label)}; a label must be text")
    if key == _CASE:
        value = dict(_by_dotted_key(value))
    return _Item(key, value, label or described(value), label or prefix + described(value))


def _by_dotted_key(table: SettingsTable, above: str = "") -> Iterator[tuple[str, Value]]:
    """Yield the settings of a case: whole tables that have a name, and single settings of others."""
    for key, value in table.items():
        if isinstance(value, Mapping) and "name" not in value:
            yield from _by_dotted_key(value, f"{above}{key}.")
        else:
            yield above + key, value


def _has_name(value: Value) -> bool:
    """Whether a value is clear without its key: a name, a table, a class, or an object that settings make."""
    return isinstance(value, str | Mapping | Choice | Method) or callable(value)


def described(value: Value) -> str:
    """A value in a few words: 0.1, "fp16", topk(keep_ratio=0.1), feedback(topk(keep_ratio=0.1)), MyNet."""
    match value:
        case Choice():
            return described({key: inner for key, inner in value.to_table().items() if inner is not None})
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(described, value))}]"
        case Mapping():
            parts = [
                described(part) if _is_named(part) else f"{key}={described(part)}"
                for key, part in value.items()
                if key != "name"
            ]
            return plugins.short(str(value.get("name", ""))) + (f"({', '.join(parts)})" if parts else "")
    is_from_python = isinstance(value, Method) or callable(value)
    return getattr(value, "__name__", type(value).__name__) if is_from_python else plugins.short(str(value))


def _is_named(value: Value) -> bool:
    inner = value if isinstance(value, list) else [value]
    return bool(inner) and all(isinstance(item, Mapping) and "name" in item for item in inner)


def _settings(items: Sequence[_Item]) -> list[tuple[str, Value]]:
    """The settings that items change, by dotted key. Whole tables come first, as a case's method must not replace the
    method.lr of another list."""
    return sorted(
        (setting for item in items for setting in item.settings.items()), key=lambda setting: setting[0].count(".")
    )


def _combination(table: SettingsTable, items: Sequence[_Item], inside: Sequence[str]) -> Combination:
    settings: dict[str, Value] = copied(table)
    title = ", ".join(item.words for item in items) or settings["name"]
    label = ", ".join(item.words for item in items if item.key != _SEED)
    try:
        swept = _settings(items)
        for key, value in swept:
            put(settings, key.split("."), copied(value), key)
        for text in inside:
            override(settings, text)
        if label and all(item.key != "label" for item in items):
            settings["label"] = label
        settings["swept"] = {item.key: item.name for item in items if item.key != _SEED}
        experiment, left_out = _without_unused(settings, [key for key, _ in swept])
    except ValueError as error:
        raise RayflError(f"{title:.200}: {error}") from None
    return Combination(title, directory_name(title), experiment, left_out)


def _without_unused(table: dict[str, Value], swept: Sequence[str]) -> tuple[Experiment, dict[str, RayflError]]:
    """The experiment without the settings that do nothing in it, and these; one that is swept itself is refused."""
    try:
        return Experiment(**table), {}
    except UnusedSetting as error:
        key, (*tables, name) = ".".join(error.key), error.key
        inner = functools.reduce(lambda outer, part: outer[part] if isinstance(outer, dict) else None, tables, table)
        # An object from Python is not changed.
        if not isinstance(inner, dict) or any(lies_in(key, other) or lies_in(other, key) for other in swept):
            raise
        del inner[name]
        experiment, others = _without_unused(table, swept)
        return experiment, {key: error, **others}


def directory_name(title: str) -> str:
    """The title without the characters that a shell or a file system treats in a special way."""
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", re.sub(r"[][]", "", title).replace(", ", ",")).strip("-.")
    name = re.sub(r"-+(?=,)", "", name)
    if name and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(title.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}".lstrip("-")
