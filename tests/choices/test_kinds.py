"""What an experiment file can choose by name is found in its room, and made from a table."""

import pytest

from rayfl.choices import kinds
from rayfl.compress.base import Compressor
from rayfl.compress.sparse import TopK
from rayfl.data.datasets import Source
from rayfl.data.partition import PartitionScheme
from rayfl.metrics.base import Metric
from rayfl.models.base import Architecture
from rayfl.schedules.base import Schedule
from rayfl.selections.base import Selection
from rayfl.tasks.base import Task
from rayfl.topology.graphs import Topology
from rayfl.wrappers.base import Wrapper
from tests.refusals import refused

KINDS: list[type[kinds.Choice]] = [
    Compressor,
    Source,
    PartitionScheme,
    Architecture,
    Metric,
    Schedule,
    Selection,
    Task,
    Topology,
    Wrapper,
]


def test_these_are_all_kinds():
    assert set(kinds.Choice.__subclasses__()) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_room_finds_its_classes_by_name(kind: type):
    found = kinds.named(kind)
    assert found
    assert list(found) == sorted(found)
    for name, each in found.items():
        assert issubclass(each, kind)
        assert each.name == name  # type: ignore[attr-defined]


def test_classes_of_other_people_stay_outside():
    class Foreign(TopK):
        name = "foreign-of-this-test"

    kinds.named.cache_clear()
    assert Foreign.name not in kinds.named(Compressor)


def test_a_table_makes_an_object():
    assert kinds.make(Compressor, {"name": "topk", "keep_ratio": 0.25}) == TopK(keep_ratio=0.25)
    table = {"name": "topk"}
    assert kinds.make(Compressor, table) == TopK()
    assert table == {"name": "topk"}, "the caller's table stays as it was"


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({}, ["name", "missing", "topk"]),
        ({"name": "topkk"}, ["topkk", "topk"]),
        ({"name": 3}, ["compressor 3", "topk"]),
        ({"name": ["topk"]}, ["topk", "unknown", "compressor"]),
        ({"name": "topk", "keep": 3}, ["keep", "keep_ratio"]),
    ],
)
def test_what_is_not_there(table: dict[str, object], names: list[str]):
    with refused(names=names):
        kinds.make(Compressor, table)
