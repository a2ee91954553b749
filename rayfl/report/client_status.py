"""Participation: the fates of the clients that were chosen, round by round and counted over all rounds."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rayfl.report import wording
from rayfl.report.charts import NUM_COLORS, key, stacked_chart
from rayfl.report.panels import Figure
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
# Blue for arrivals, warm colours for losses.
_STYLES = (0, 1, 4, 3, 6, 5, 2)
_OTHERS = "others"


def counts(run: Run) -> Counter[str]:
    """The number of times that each status occurs, over all clients and rounds."""
    return Counter(run.clients["status"].to_pylist())


def fates(groups: Sequence[Group]) -> dict[str, object] | None:
    """A table of statuses over all rounds: a row a status for one run, a row a run for several (means over seeds).

    None where all clients that were ever chosen delivered.
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


def fate_chart(group: Group) -> Figure:
    """Clients of each round by status, those that delivered at the bottom; the rarest together where they are many."""
    run = group.runs[0]
    rounds, status = run.clients["round"].to_numpy(), np.array(run.clients["status"].to_pylist())
    common = [name for name, _ in counts(run).most_common()]
    if len(common) > NUM_COLORS:
        status = np.where(np.isin(status, common[NUM_COLORS - 1 :]), _OTHERS, status)
    names = sorted(set(status.tolist()), key=lambda name: (name != "delivered", name == _OTHERS, name))
    x = run.rounds["round"].to_numpy()
    places = np.searchsorted(x, rounds)
    parts = [
        (_word(name), style, np.bincount(places[status == name], minlength=len(x))[: len(x)])
        for style, name in zip(_STYLES, names, strict=False)
    ]
    caption = "What became of the clients that were chosen for each round."
    return Figure("Delivered and dropped", caption, stacked_chart(x, parts, "Clients"), legend=True)
