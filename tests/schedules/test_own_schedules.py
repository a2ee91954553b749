"""A schedule of somebody else is checked hook by hook, and fails in one sentence."""

from pathlib import Path

import pytest

from rayfl.errors import HookError, MethodError
from rayfl.testing.executors import play
from tests.schedules.test_schedules import here

WRONG = """
from rayfl.schedules.base import Schedule


class Broken(Schedule):
    def due(self, now):
        return now.second / 0
"""


def test_somebodys_schedule_that_fails(tmp_path: Path):
    (tmp_path / "wrong.py").write_text(WRONG)
    with pytest.raises(MethodError, match=r"round 0: Broken\.due.*ZeroDivisionError.*wrong\.py:7"):
        play(here(f"{tmp_path}/wrong.py:Broken"))


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        ("def due(self, now): return None", "round 0: Broken.due must return a number of seconds; it returns None"),
        ("def due(self, now): return float('nan')", "due must return .* it returns nan"),
        ("def begins(self, now): return 1.5", "Broken.begins must return a whole number; it returns 1.5"),
        (
            "def scale(self, staleness): return float('inf')",
            "scale must return a finite number, or None; it returns inf",
        ),
        ("def scale(self, staleness): return 'half'", "Broken.scale must return .* 'half'"),
        ("mixes_models = True", "Broken.due waits for several messages; mixes_models"),
        ("def check(self, places, num_clients): return 1 / 0", "Broken.check: ZeroDivisionError"),
    ],
)
def test_what_somebodys_schedule_must_return(hook: str, match: str, tmp_path: Path):
    head = WRONG.replace("now.second / 0", "-math.inf if now.arrived >= 2 else math.inf")
    (tmp_path / "wrong.py").write_text(f"import math\n{head}\n    {hook}\n")
    with pytest.raises((MethodError, HookError), match=match):
        play(here(f"{tmp_path}/wrong.py:Broken", rounds=1))
