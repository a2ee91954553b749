"""Facts about a metric's value that a report needs: its title, its unit, its range, and which direction is better.

A run directory has them in metrics.json, so that a report needs neither torch nor the file of a third party's metric.
"""

from typing import Literal

from pydantic import Field

from rayfl.settings import Settings

FigureKind = Literal["", "matrix", "calibration"]
"""The figure that the report draws of a metric's values; "": none."""


PLACES = (
    *("pooled", "own", "own_after_training", "unseen", "unseen_after_training", "unseen_before_adapting"),
    *("pooled_train", "own_train", "own_train_after_training", "unseen_train", "unseen_train_after_training"),
    *("personal_pooled", "personal_pooled_after_training"),
)
"""What an evaluation evaluates (rayfl/rounds/evaluation.py); the names of values begin with it."""


class Facts(Settings):
    """The facts of one value of a metric. A value with the unit "%" is a share of 1 that is shown in percent."""

    title: str
    meaning: str = Field(
        default="", description='the beginning of a sentence on the value: "The share of correct predictions"'
    )
    unit: str = ""
    low: float | None = Field(default=None, description="the smallest value; None: there is none")
    high: float | None = Field(default=None, description="the largest value; None: there is none")
    higher_is_better: bool | None = Field(default=None, description="None: neither direction is better")
    ranks: bool = Field(default=False, description="whether runs are compared by it, in tables and targets")
    drawn: FigureKind = ""

    @property
    def is_percent(self) -> bool:
        """Whether the value is a share of 1 that is shown in percent."""
        return self.unit == "%"

    @property
    def sign(self) -> int:
        """Sorts values: the better of two has the larger product with it. 1 if neither direction is better."""
        return -1 if self.higher_is_better is False else 1

    def words(self, value: float, decimals: int | None = None) -> str:
        """A value with its unit: "81.2 %", "0.4312", "12.3 nats". decimals: of percent, by default 1."""
        percent = f"{100 * value:.{1 if decimals is None else decimals}f} %"
        return percent if self.is_percent else f"{value:,.4g} {self.unit}".strip()

    @property
    def range_words(self) -> str:
        """The range in words: "0 to 1", "from 0"."""
        if self.low is None or self.high is None:
            return f"from {self.low:g}" if self.low is not None else f"up to {self.high:g}"
        return f"{self.low:g} to {self.high:g}"

    def holds(self, value: float) -> bool:
        """Whether a value lies in the range."""
        return (self.low is None or self.low <= value) and (self.high is None or value <= self.high)


ACCURACY = Facts(
    title="Accuracy",
    meaning="The share of correct predictions",
    unit="%",
    low=0.0,
    high=1.0,
    higher_is_better=True,
    ranks=True,
)
LOSS = Facts(
    title="Loss",
    meaning="The mean loss (cross-entropy in nats, or the task's own)",
    unit="mean per example",
    higher_is_better=False,
)
RECORDED_BEFORE = {"loss": LOSS, "accuracy": ACCURACY}
"""The facts of a run that is older than metrics.json."""
