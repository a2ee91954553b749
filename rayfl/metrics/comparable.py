"""Values by which runs can be compared: those of metrics that have a better direction, in every evaluation."""

from collections.abc import Mapping

from rayfl.metrics.facts import PLACES, Facts
from rayfl.metrics.fairness import OVER_CLIENTS, facts_over_clients


def comparable(known: Mapping[str, Facts]) -> dict[str, Facts]:
    """The facts of each value by its name with the place, such as "own_worst/accuracy".

    known: the facts of an experiment's values, without their places.
    """
    evaluations = [*PLACES, *(f"{place}_{word}" for word in OVER_CLIENTS for place in PLACES)]
    return {
        f"{evaluation}/{name}": facts_over_clients(evaluation, facts)
        for name, facts in known.items()
        if facts.higher_is_better is not None
        for evaluation in [*evaluations, *["train"] * (name == "loss")]
    }


def default_metric(known: Mapping[str, Facts], by_client: bool) -> str:
    """The name of the value that decides by default: that of the first metric that ranks runs, or of the loss.

    by_client: whether each client's model is evaluated on the client's own examples.
    """
    ranking = next((name for name, facts in known.items() if facts.ranks), "loss")
    return f"{'own' if by_client else 'pooled'}/{ranking}"
