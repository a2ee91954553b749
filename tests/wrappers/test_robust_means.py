"""Robust means against numpy, in slices, under the engine, and against attacks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.errors import MethodError
from rayfl.rounds import aggregation
from rayfl.testing.executors import Shuffled, play
from rayfl.testing.executors import rows as recorded
from rayfl.wrappers.robust import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    RobustWrapper,
    TrimmedMean,
)
from tests.refusals import refused
from tests.wrappers.every_wrapper import UNIFORM, Recorder, flat, here

ROWS = np.random.default_rng(3).normal(size=(9, 50)) + np.arange(9)[:, None] ** 2 / 10


def krum(rows: np.ndarray, byzantine: int, keep: int) -> np.ndarray:
    count = len(rows)
    scores = [
        np.sort([((one - other) ** 2).sum() for place, other in enumerate(rows) if place != mine])[
            : count - byzantine - 2
        ].sum()
        for mine, one in enumerate(rows)
    ]
    return rows[np.argsort(scores)[:keep]].mean(axis=0)


def weiszfeld(rows: np.ndarray) -> np.ndarray:
    point = rows.mean(axis=0)
    for _ in range(32):
        weights = 1 / np.maximum(np.linalg.norm(rows - point, axis=1), 1e-6)
        point = weights @ rows / weights.sum()
    return point


def clipped_to(center: np.ndarray, rows: np.ndarray, radius: float, steps: int) -> np.ndarray:
    for _ in range(steps):
        moves = rows - center
        center = center + np.mean([one * min(1, radius / np.linalg.norm(one)) for one in moves], axis=0)
    return center


REFERENCES: list[tuple[RobustWrapper, np.ndarray]] = [
    (CoordinateMedian(), np.median(ROWS, axis=0)),
    (TrimmedMean(trim=0.25), np.sort(ROWS, axis=0)[2:-2].mean(axis=0)),
    (Krum(byzantine=2), krum(ROWS, 2, 1)),
    (Krum(byzantine=2, keep=7), krum(ROWS, 2, 7)),
    (Krum(byzantine=3, keep=4), krum(ROWS, 3, 4)),
    (GeometricMedian(), weiszfeld(ROWS)),
    (CenteredClipping(radius=20.0, steps=3), clipped_to(np.ones(50), ROWS, 20.0, 3)),
]


@pytest.mark.parametrize(("rule", "expected"), REFERENCES, ids=lambda one: getattr(one, "name", ""))
def test_a_rule_is_its_numpy_reference_in_any_slices(rule: RobustWrapper, expected: np.ndarray):
    rows = torch.from_numpy(np.vstack([ROWS, np.ones((int(rule.keeps_center), 50))]).astype(np.float32))
    for cuts in ([50], [7, 20, 23]):
        slices = rows.split(cuts, dim=1)
        decision = rule.decide(sum(rule.measure(one) for one in slices)) if rule.measures else None  # type: ignore[arg-type]
        found = torch.cat([rule.combine(one, decision) for one in slices]).numpy()
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_an_even_median_and_few_messages():
    assert CoordinateMedian().combine(torch.tensor([[1.0], [5.0], [2.0], [9.0]]), None).tolist() == [3.5]
    one = torch.tensor([[2.0, 3.0]])
    for rule in (CoordinateMedian(), TrimmedMean(), Krum(), GeometricMedian()):
        decision = rule.decide(rule.measure(one)) if rule.measures else None
        assert rule.combine(one, decision).tolist() == [[2.0, 3.0]][0]


@pytest.mark.parametrize("name", ["coordinate-median", "krum", "centered-clipping"])
def test_the_server_moves_by_the_robust_mean(name: str, monkeypatch: pytest.MonkeyPatch):
    """With dropouts, in slices of a hundred entries, on one worker and on three."""
    monkeypatch.setattr(aggregation, "ENTRIES", 700)
    rule = {"name": "krum", "keep": 3} if name == "krum" else name
    made = here(Recorder, rule, rounds=3, clients={"dropout_after_training": 0.2}, **UNIFORM)
    records, states = play(made)
    before, center = dict(made.initial), np.zeros(tree.num_entries(made.initial))
    for record, state in zip(records, states, strict=True):
        sent = np.array([flat(one) for time, _, one in Recorder.seen if time == record.row.round])
        expected = {
            "coordinate-median": np.median(sent, axis=0),
            "krum": krum(sent, 1, 3),
            "centered-clipping": clipped_to(center, sent, 1.0, 1),
        }[name]
        now = dict(state.server["params"])
        assert tree.vector(tree.sub(before, now)).numpy() == pytest.approx(expected, rel=1e-3, abs=1e-6)
        before, center = now, expected
    assert any(len([row for row in record.clients if row.status == "delivered"]) < 6 for record in records)
    assert recorded(play(made, Shuffled(made))[0]) == recorded(records)


@pytest.mark.parametrize("name", ["trimmed-mean", "krum", "geometric-median"])
def test_it_holds_where_the_mean_does_not(name: str):
    attack: dict[str, Any] = {"name": "attack", "kind": "gaussian", "share": 0.2, "strength": 5.0}
    options: dict[str, Any] = {**UNIFORM, "partition": "iid", "clients": {"count": 10}, "rounds": 4}
    options["method"] = {**UNIFORM["method"], "lr": 0.3, "batch_size": 20}
    mean, robust = (play(here(*wrap, **options))[0][-1].means["pooled/accuracy"] for wrap in ([attack], [name, attack]))
    assert robust > 0.5 and robust > mean + 0.2


def test_what_robust_means_refuse():
    with refused(names=["wrap", "krum", "byzantine=2", "7 clients", "5"]):
        here({"name": "krum", "byzantine": 2}, clients={"count": 6, "per_round": 5}, **UNIFORM)
    with refused(names=["wrap", "krum", "method.weighting='uniform'"]):
        here("krum", method={"name": "fedavg"})
    for method in ("scaffold", "fedmgda", "signsgd"):
        with refused(names=["wrap", "trimmed-mean", "means"]):
            here("trimmed-mean", method=method)
    with refused(names=["wrap", "krum", "store_share", "clients.per_round"]):
        here({"name": "krum", "store_share": 1e-9}, **UNIFORM)
    with refused(names=["wrap", "central-dp", "private"]):
        here("krum", {"name": "central-dp"}, **UNIFORM)
    with refused(names=["wrap", "krum", "other sums"]):
        here("clip", "krum", **UNIFORM)
    play(here("krum", "clip", rounds=1, **UNIFORM))
    play(here("elastic", "krum", rounds=1, **UNIFORM))


RULE = """
from rayfl.wrappers.robust import RobustWrapper


class Wrong(RobustWrapper):
    measures = True

    def combine(self, rows, decision):
        return rows.mean(dim=0)

    {hook}
"""


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        ("def combine(self, rows, decision): return rows.mean(dim=0)[:3]", "Wrong.combine must return .* 910 finite"),
        ("def combine(self, rows, decision): return rows.mean(dim=0) * float('nan')", "Wrong.combine must return"),
        ("def combine(self, rows, decision): return rows.double().mean(dim=0)", "Wrong.combine must return .*float32"),
        ("def combine(self, rows, decision): return 1 / 0", r"round 0: Wrong.combine: ZeroDivisionError.*wrong\.py:11"),
        ("def measure(self, rows): return rows.numpy()[0]", "Wrong.measure must return .* shape"),
        ("def measure(self, rows): return None", "Wrong.measure must return .* it returns None"),
        ("def decide(self, statistics): return 1 / 0", "round 0: Wrong.decide: ZeroDivisionError"),
    ],
)
def test_hooks_of_somebodys_rule(hook: str, match: str, tmp_path: Path):
    (tmp_path / "wrong.py").write_text(RULE.replace("{hook}", hook))
    with pytest.raises(MethodError, match=match):
        play(here({"name": f"{tmp_path}/wrong.py:Wrong"}, **UNIFORM, rounds=1))
