"""Random experiments: a seed and a version of the generator draw one, the same for ever.

A plain experiment with a drawn method on drawn data, which rayfl takes, gets a number of drawn additions, one after
another. An addition that rayfl refuses beside those before is left out. Every draw has a generator of its own, keyed by
its name, so that no draw moves another one; `fuzz_choices` says how choices are added.

What rayfl refuses may change. So an experiment has a name, "17.3f", of the seed and the additions that were kept, as
the bits of a number, and the name makes the same experiment whatever is refused.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import fuzz_choices as choices
from benchmarks.fuzz_choices import Choices, of_version
from rayfl.choices.kinds import find
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.table import put
from rayfl.methods.base import Method, PeerHalf
from rayfl.testing.executors import fitting_graph

# Any: tables of an experiment.
Tables = dict[str, Any]


class Addition(NamedTuple):
    """A setting, or a whole table, that is given beside the plain experiment. `stage`: those of a lower one come first,
    because others are only allowed beside them."""

    path: str
    # Any: a value of a setting.
    value: Any
    stage: int = 1


@dataclass(frozen=True)
class Draws:
    """The random draws for a seed."""

    seed: int
    version: int = choices.LATEST

    def number(self, name: str) -> float:
        """A number in [0, 1)."""
        # Python promises that this stays the same in later versions, which it does not of `choice` and `example`.
        return random.Random(f"rayfl fuzz {self.version} {self.seed} {name}").random()

    # Any: a value of a setting.
    def one(self, name: str, options: Choices | Sequence[Any]) -> Any:
        """One of the options."""
        values = of_version(options, self.version) if isinstance(options, Mapping) else options
        return values[int(self.number(name) * len(values))]


class Drawn(NamedTuple):
    """An experiment with some of the additions of its seed."""

    draws: Draws
    kept: tuple[int, ...]
    tables: Tables

    @property
    def name(self) -> str:
        """The name that makes this experiment again."""
        return f"{self.draws.seed}.{sum(1 << place for place in self.kept):x}"

    @property
    def words(self) -> str:
        """The additions, in short."""
        possible = additions(self.draws)
        return ", ".join(f"{possible[place].path}={shown(possible[place].value)}" for place in self.kept)

    def keeping(self, kept: Sequence[int]) -> "Drawn":
        """The same experiment with these additions only."""
        return Drawn(self.draws, tuple(kept), with_additions(self.draws, kept))


def plain(draws: Draws) -> Tables:
    """The tables without additions."""
    name = draws.one("method", choices.METHODS)
    kind = find(Method, name)
    needed = {key: value for key, value in choices.NEEDED.get(name, {}).items() if key in kind.Hyper.model_fields}
    tables: Tables = {
        "name": "fuzz",
        "seed": draws.seed,
        "rounds": draws.one("rounds", (3, 4, 5)),
        "data": draws.one("data", choices.DATA),
        "partition": {"name": "dirichlet-sizes"},
        "clients": {"count": draws.one("clients.count", (4, 5, 6, 7, 8))},
        "model": {"name": "mlp", "hidden": [10]},
        "method": {"name": name, **needed},
        "evaluation": {"every": draws.one("evaluation.every", (1, 1, 2, 3))},
        "checkpoint": {"every": draws.one("checkpoint.every", (1, 2, 3))},
        "runtime": {"engine": "loop"},
        "output": {"report": False, "track": []},
        **choices.NEEDED_TABLES.get(name, {}),
    }
    can = kind.capabilities
    if can.uses_graph or (kind.gather and issubclass(kind, PeerHalf)):
        tables["topology"] = fitting_graph(can)
    if can.in_pairs:
        tables["schedule"] = {"name": "gossip", "partners": 1}
    return deepcopy(tables)


def additions(draws: Draws) -> list[Addition]:
    """The additions that are drawn for a seed, in the order in which they are tried."""
    kind = find(Method, draws.one("method", choices.METHODS))
    is_peer, added = issubclass(kind, PeerHalf), list[Addition]()

    # Any: the options of a setting.
    def maybe(path: str, options: Choices | Sequence[Any], chance: float, stage: int = 1, key: str = "") -> None:
        if draws.number(f"{path}{key}?") < chance and of_version(as_choices(options), draws.version):
            added.append(Addition(path, draws.one(f"{path}{key}", options), stage))

    if not is_peer:
        maybe("clients.per_round", (1, 2, 3, 4), 0.7, stage=0)
        maybe("schedule", choices.SCHEDULES, 0.6, stage=0)
        maybe("rounds", (6, 8), 0.2)
        maybe("downlink", choices.DOWNLINKS, 0.25)
        maybe("selection", choices.SELECTIONS, 0.35)
        maybe("wrap", choices.WRAPPERS, 0.4)
        maybe("wrap", choices.WRAPPERS, 0.15, key=" again")
    if kind.capabilities.uses_graph or (kind.gather and is_peer):
        maybe("topology", choices.TOPOLOGIES, 0.8, stage=0)
        maybe("topology.weights", ("metropolis",), 0.3)
    if is_peer:
        maybe("schedule", choices.PEER_SCHEDULES, 0.6, stage=0, key=" of peers")
    maybe("model", choices.MODELS, 0.6, stage=0)
    maybe("partition", choices.PARTITIONS, 0.8, stage=0)
    maybe("runtime", ({"engine": "vmap", "stack_width": 2}, {"engine": "vmap", "stack_width": 3}), 0.5)
    maybe("uplink", choices.UPLINKS, 0.6)
    maybe("parts", choices.PARTS, 0.25)
    maybe("adapters", choices.ADAPTERS, 0.1)
    for name, options in choices.HYPER.items():
        owner, _, setting = name.rpartition(".")
        # A setting that the method lacks is refused, so that no other addition moves when a method gets or loses one.
        if owner in ("", kind.name):
            maybe(f"method.{setting}", options, 0.2, key=f" {owner}")
    for table, settings in (
        ("clients", choices.CLIENTS),
        ("splits", choices.SPLITS),
        ("evaluation", choices.EVALUATION),
    ):
        for name, options in settings.items():
            maybe(f"{table}.{name}", options, 0.2)
    maybe("clients.availability_s", (0.1, 0.5), 0.8, stage=2)
    return sorted(added, key=lambda each: (each.stage, draws.number(f"order {each.path}")))


# Any: the options of a setting.
def as_choices(options: Choices | Sequence[Any]) -> Choices:
    return options if isinstance(options, Mapping) else {1: options}


def with_additions(draws: Draws, kept: Sequence[int]) -> Tables:
    """The tables with some of the additions, by their places."""
    tables = plain(draws)
    possible = additions(draws)
    for place in sorted(kept):
        path, value, _ = possible[place]
        if path == "wrap":
            tables["wrap"] = [*tables.get("wrap", []), deepcopy(value)]
        else:
            put(tables, path.split("."), deepcopy(value), path)
    return tables


def drawn(draws: Draws, refused: Callable[[Tables], bool] | None = None) -> Drawn:
    """The experiment of a seed: the plain one with the additions that rayfl takes, tried in their order.

    `refused`: whether rayfl refuses tables. Raise RayflError if it refuses the plain ones.
    """
    refused, kept = refused or is_refused, list[int]()
    for place in range(len(additions(draws))):
        if not refused(with_additions(draws, [*kept, place])):
            kept.append(place)
    return Drawn(draws, tuple(kept), with_additions(draws, kept))


def is_refused(tables: Tables) -> bool:
    """Whether rayfl refuses an experiment before it starts. Any other error is a finding, and is raised."""
    try:
        prepare(Experiment(**tables))
    except RayflError:
        return True
    return False


def named(name: str, version: int) -> Drawn:
    """The experiment with a name, "17.3f". Raise RayflError if there is none."""
    match = re.fullmatch(r"([0-9]{1,18})\.([0-9a-f]{1,40})", name)
    if match is None:
        raise RayflError(f"--seeds {name} is not allowed; give one as 17, several as 1-20, or a name as 17.3f")
    draws, bits = Draws(int(match[1]), version), int(match[2], 16)
    if bits >> len(additions(draws)):
        raise RayflError(f"--seeds {name} names additions that seed {draws.seed} has not; give {draws.seed} alone")
    kept = [place for place in range(bits.bit_length()) if bits >> place & 1]
    return Drawn(draws, tuple(kept), with_additions(draws, kept))


# Any: a value of a setting.
def shown(value: Any) -> str:
    """A value in short: the name of a table with one."""
    return str(value.get("name", value.get("engine", value))) if isinstance(value, Mapping) else str(value)
