"""What a user reads when a setting is wrong: one sentence with the key, the value and what is allowed."""

import pickle
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

from rayfl.errors import RayflError, UnknownName, did_you_mean
from rayfl.settings import Settings, describe, shown
from tests.refusals import mentions, refused


class Range(Settings):
    low: float = 0.0
    high: float


class Inner(Settings):
    ratio: float = Field(default=0.5, gt=0, le=1)
    weights: float | tuple[float, ...] | Range = 1.0

    @field_validator("ratio")
    @classmethod
    def _not_a_third(cls, ratio: float) -> float:
        if ratio == 0.25:
            raise RayflError(f"={ratio} is a quarter; take another", key=("ratio",))
        if ratio == 0.75:
            raise RayflError("three quarters are too much")
        return ratio


class Outer(Settings):
    count: int = Field(ge=1)
    kind: Literal["a", "b"] = "a"
    on: bool = False
    widths: tuple[int, ...] = ()
    pair: tuple[int, int] | None = None
    inner: Inner = Inner()

    @model_validator(mode="after")
    def _few(self) -> "Outer":
        if self.count == 13:
            raise RayflError("=13 and kind='a' do not go together", key=("count",))
        if self.count == 14:
            raise RayflError("fourteen is odd")
        if self.count == 15:
            raise ValueError("fifteen is odder")
        return self


NAN, INF = float("nan"), float("inf")
RIGHT: dict[str, Any] = {"count": 2, "widths": [3, 4], "pair": [1, 2], "inner": {"ratio": 1, "weights": {"high": 2}}}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"cuont": 3}, ["cuont", "count"]),
        ({"count": 1, "zzz": 3}, ["zzz", "count, inner, kind, on, pair, widths"]),
        ({"count": 1, "inner": {"ratoi": 3}}, ["inner.ratoi", "ratio"]),
        ({}, ["count", "missing"]),
        ({"count": 0}, ["count=0", "at least 1"]),
        ({"count": "3"}, ["count='3'", "at least 1"]),
        ({"count": 3.0}, ["count=3.0", "at least 1"]),
        ({"count": True}, ["count=true", "at least 1"]),
        ({"count": None}, ["count=None", "at least 1"]),
        ({"count": 1, "kind": "c"}, ["kind='c'", "'a'", "'b'"]),
        ({"count": 1, "on": 1}, ["on=1", "true or false"]),
        ({"count": 1, "widths": [1, "x"]}, ["widths=[1, 'x']", "numbers"]),
        ({"count": 1, "widths": 3}, ["widths=3", "numbers"]),
        ({"count": 1, "pair": [1]}, ["pair=[1]", "2"]),
        ({"count": 1, "inner": 3}, ["inner=3", "table", "ratio"]),
        ({"count": 1, "inner": {"ratio": 2}}, ["inner.ratio=2", "(0, 1]"]),
        ({"count": 1, "inner": {"ratio": 0.25}}, ["inner.ratio=0.25", "quarter"]),
        ({"count": 1, "inner": {"ratio": 0.75}}, ["inner.ratio", "three quarters"]),
        ({"count": 13}, ["count=13", "kind='a'"]),
        ({"count": 14}, ["fourteen is odd"]),
        ({"count": 1, "inner": {"ratio": NAN}}, ["inner.ratio=nan", "(0, 1]"]),
        ({"count": 1, "inner": {"ratio": INF}}, ["inner.ratio=inf", "(0, 1]"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_one_sentence(given: dict[str, Any], names: list[str]):
    with refused(names=names) as error:
        Outer(**given)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("value", "text"), [("x", "'x'"), (["y"], "['y']"), ({"other": 1}, "{'other': 1}"), ({}, "{}")]
)
def test_a_union_is_one_sentence(value: Any, text: str):
    with refused(names=[f"weights={text}", "a number", "a list of numbers", "a table", "low", "high"]):
        Inner(weights=value)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"lo": 1}, ["weights.lo", "low"]),
        ({"low": 1.0}, ["weights.high", "missing"]),
        ({"low": 1.0, "high": "x"}, ["weights.high='x'", "a number"]),
    ],
)
def test_what_is_wrong_in_the_table_that_was_meant_is_said(value: Any, names: list[str]):
    with refused(names=names):
        Inner(weights=value)


def test_a_plain_error_of_a_validator_names_the_class_and_its_file():
    with refused(names=["fifteen is odder", "Outer", __file__]):
        Outer(count=15)


def test_what_is_right_passes():
    outer = Outer(**RIGHT)
    assert (outer.widths, outer.pair, outer.inner.ratio) == ((3, 4), (1, 2), 1.0)
    assert outer.inner.weights == Range(low=0.0, high=2.0)
    assert Outer(**outer.model_dump()) == outer


def test_settings_are_frozen():
    with pytest.raises(ValidationError) as raised:
        Range(high=1.0).high = 2.0  # type: ignore[misc]
    assert [one["type"] for one in raised.value.errors()] == ["frozen_instance"]


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RayflError("=3 is wrong", ("a", "b"))))  # noqa: S301
    assert str(error) == "a.b=3 is wrong"
    assert str(error.under("c")) == "c.a.b=3 is wrong"
    unknown = pickle.loads(pickle.dumps(UnknownName("unknown model 'x': did you mean 'y'?")))  # noqa: S301
    assert str(unknown.under("model")) == "unknown model 'x': did you mean 'y'?"


def test_a_sentence_without_a_key_gets_the_table_before_it():
    assert str(RayflError("give one of both")) == "give one of both"
    assert str(RayflError("give one of both").under("clients")) == "clients: give one of both"


@pytest.mark.parametrize(
    ("annotation", "bounds", "facts"),
    [
        (int, [Field(ge=1)], ["whole number", "at least 1"]),
        (float, [Field(gt=0, lt=1)], ["number", "(0, 1)"]),
        (float, [Field(ge=0, le=1e6)], ["number", "[0, 1e+06]"]),
        (float, [Field(lt=3)], ["number", "less than 3"]),
        (float, [Field(le=3)], ["number", "at most 3"]),
        (float | None, [Field(gt=0)], ["number", "greater than 0", "left out"]),
        (tuple[Annotated[int, Field(ge=1)], ...], [], ["list", "whole numbers", "at least 1"]),
        (tuple[str, ...], [], ["list", "texts"]),
        (Literal["a", "b", "c"], [], ["'a'", "'b'", "'c'"]),
        (Path | None, [], ["path", "left out"]),
        (Outer, [], ["table"]),
        (dict, [], ["dict"]),
    ],
)
def test_describe(annotation: Any, bounds: list[Any], facts: list[str]):
    found = describe(annotation, bounds)
    assert [fact for fact in facts if not mentions(found, fact)] == [], found
    assert mentions(found, "left out") == ("left out" in facts) and mentions(found, "list") == ("list" in facts)


def test_long_values_are_cut():
    assert shown(list(range(1000))) == "[" + ", ".join(str(i) for i in range(22)) + "..."
    assert len(shown("x" * 500)) == 80


@pytest.mark.parametrize(
    ("name", "known", "told", "hidden"),
    [
        ("keep_rato", ["keep_ratio", "lr"], "'keep_ratio'", "lr"),
        ("lr", ["clients.count", "method.lr"], "'method.lr'", "clients.count"),
        ("xyz", ["b", "a"], "a, b", "none"),
        ("fedspe", ["fedpse", "fedspeed"], "'fedpse'", "fedspeed"),
        ("sgd", ["sgd-plain", "sgdx", "sgd-fast"], "'sgd-fast' or 'sgd-plain'", "sgdx"),
        ("xyz", [], "none", "xyz"),
        ("xyz", [f"layer-{number:03}" for number in range(100)], "layer-000", "layer-099"),
    ],
)
def test_an_unknown_name_is_told_the_closest_one_or_all(name: str, known: list[str], told: str, hidden: str):
    found = did_you_mean(name, known)
    assert mentions(found, told) and not mentions(found, hidden)
