"""What is written as TOML reads back the same."""

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.experiment.toml import dumps

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


def test_the_layout():
    table = {
        "rounds": 5,
        "clients": {"count": 2, "speed": {"median": 1e-05, "sigma": 1.0}, "per_round": None, "traits": [0.5, 1.0]},
        "only": {"inner": {"on": True}},
        "empty": {},
        "name": 'a "b"\\\n',
        "tables": [{"a": 1, "b": None}, {"c d": ["x"]}],
    }
    assert dumps(table) == (
        "rounds = 5\n"
        'name = "a \\"b\\"\\\\\\n"\n'
        'tables = [{a = 1}, {"c d" = ["x"]}]\n'
        "\n[clients]\ncount = 2\ntraits = [0.5, 1.0]\n"
        "\n[clients.speed]\nmedian = 1e-05\nsigma = 1.0\n"
        "\n[only.inner]\non = true\n"
        "\n[empty]\n"
    )


def test_nan_and_infinity():
    read = tomllib.loads(dumps({"a": math.nan, "b": math.inf, "c": -math.inf}))
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", [b"x", [1, None], {"a": {1, 2}}], ids=str)
def test_what_toml_cannot_hold(value: Any):
    with pytest.raises(ValueError, match=r"TOML cannot hold .* of type"):
        dumps({"key": value})
