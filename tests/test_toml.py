"""What is written as TOML reads back the same."""

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.toml import dumps
from tests.refusals import refused

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab .\"\n'é", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text("xyz.-_ ", max_size=3), values, max_size=5))
def test_whatever_is_written_reads_back(table: dict[str, Any]):
    assert tomllib.loads(dumps(table)) == table


def test_what_is_left_out_is_not_written():
    table = {"rounds": 5, "clients": {"count": 2, "per_round": None}, "tables": [{"a": 1, "b": None}], "empty": {}}
    expected = {"rounds": 5, "clients": {"count": 2}, "tables": [{"a": 1}], "empty": {}}
    assert tomllib.loads(dumps(table)) == expected


def test_nan_and_infinity():
    read = tomllib.loads(dumps({"a": math.nan, "b": math.inf, "c": -math.inf}))
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", [b"x", [1, None], {"a": {1, 2}}], ids=str)
def test_what_toml_cannot_hold(value: Any):
    with refused(names=["TOML", "type"]):
        dumps({"key": value})
