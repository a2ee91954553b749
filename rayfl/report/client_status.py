"""What became of the clients that were chosen, counted over all rounds."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rayfl.report import wording
from rayfl.report.colors import key
from rayfl.report.series import Group
from rayfl.run_directory.record import Run

_MEANINGS = {
    "delivered": "its update arrived",
    "silent": "it had nothing to send",
    "not_selected": "it trained for itself, without an upload",
    "dropped_before_download": "it vanished before anything was sent",
    "dropped_after_download": "it vanished with the model, before it had trained",
    "dropped_after_training": "it vanished when it had trained",
    "upload_lost": "its update was sent and never arrived",
    "late": "it was not back by the deadline",
    "surplus": "enough others were back before it",
}
"""The meaning of each status, in the order in which a page shows them."""


def counts(run: Run) -> Counter[str]:
    """How often each status occurs, over all clients and rounds."""
    return Counter(run.clients["status"].to_pylist())


def fates(groups: Sequence[Group]) -> dict[str, object] | None:
    """A table of statuses over all rounds: a row per status for one group, else a row per group (means over seeds).

    None if every chosen client delivered.
    """
    found = [[counts(run) for run in group.runs] for group in groups]
    names = [name for name in _MEANINGS if any(count[name] for group in found for count in group)]
    if set(names) <= {"delivered"}:
        return None
    means = [{name: float(np.mean([count[name] for count in group])) for name in names} for group in found]
    if len(groups) == 1:
        rows = [(_word(name), [*_cells(means[0], name), _MEANINGS[name]]) for name in names]
        return {"head": ["What became of a client", "Times", "Share", "Why"], "rows": rows}
    rows = [
        (key(group.label, style), ["{} ({})".format(*_cells(mean, name)) for name in names])
        for style, (group, mean) in enumerate(zip(groups, means, strict=True))
    ]
    return {"head": ["Run", *map(_word, names)], "rows": rows}


def _word(status: str) -> str:
    return status.replace("_", " ")


def _cells(mean: dict[str, float], name: str) -> list[str]:
    total = sum(mean.values())
    return [f"{mean[name]:,.10g}", wording.percent(mean[name] / total if total else 0.0)]
