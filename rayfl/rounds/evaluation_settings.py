"""The `[evaluation]` table of an experiment."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rayfl.choices.kinds import TO_TABLE, from_table
from rayfl.errors import RayflError
from rayfl.metrics.base import Metric
from rayfl.settings import Settings
from rayfl.untyped import Value


def _several(given: Value) -> Sequence[Value]:
    """A list of metrics; a single one needs no list. Raise RayflError for an empty list."""
    if isinstance(given, list | tuple) and not given:
        raise RayflError("=[] names none; leave it out to have those of the task", ("metrics",))
    return given if isinstance(given, list | tuple) else (given,)


ChosenMetrics = Annotated[tuple[Annotated[Metric, from_table(Metric), TO_TABLE], ...], BeforeValidator(_several)]


class Evaluation(Settings):
    """The `[evaluation]` table: how often models are evaluated, and on what."""

    every: int = Field(
        default=1, ge=0, description="evaluate every N rounds and after the last one; 0: only after the last one"
    )
    split: Literal["test", "validation"] = Field(
        default="test",
        description="validation: all test data are replaced by a share of each client's train split, which no method "
        "sees (splits.validation_ratio, or 0.2)",
    )
    pooled: bool = Field(default=True, description="evaluate the global model on the pooled test set")
    own: bool = Field(default=True, description="evaluate each client's model on its own test split")
    personal_on_pooled: bool = Field(
        default=False, description="evaluate each personal model on the pooled test set too"
    )
    train: bool = Field(default=False, description="evaluate on training examples too: train accuracy")
    clients: int | None = Field(
        default=None,
        ge=1,
        description="evaluate only this number of clients, drawn once from the seed; default: all; unseen clients are "
        "not counted, and all of them are evaluated",
    )
    metrics: ChosenMetrics | None = Field(
        default=None, description="metrics, each by its name or as a table; default: those of the task"
    )
    merged: bool = Field(
        default=False, description="also record each metric of all clients' examples together, and its weighted mean"
    )
    masks: bool = Field(
        default=False, description="compare the clients' masks after the last round, pair by pair, beside their labels"
    )

    @property
    def by_client(self) -> bool:
        """Whether clients' own models or examples are evaluated."""
        return self.own or self.train or self.personal_on_pooled
