"""Clients that keep a share of the model, on a page: accuracy by retention ratio (Dis-PFL, Figure 4), distances of
masks beside likeness of labels (its Figure 5), and masks drawn (MCE-PL, Figures 8 and 9).
"""

import re
from collections.abc import Sequence

import numpy as np
from safetensors import SafetensorError, safe_open

from rayfl.limits.regular_files import require_regular
from rayfl.report.charts import Line, Strip, cells_chart, lines_chart, strips_chart
from rayfl.report.panels import Figure, Section
from rayfl.report.series import Group, curve, metric_names, series, spread
from rayfl.report.wording import title
from rayfl.rounds.mask_comparison import CORRELATION, HAMMING, SIMILARITY
from rayfl.run_directory.record import Run
from rayfl.run_directory.saved_models import model_files

_GROUP = re.compile(r"(.+/accuracy)_at_retention_([\d.e+-]+)")
_MOST_CLIENTS = 40
"""The most clients whose matrix is drawn."""
_DRAWN = 4
"""Clients whose masks are drawn, as in MCE-PL's figures."""
_FILTERS = 20
"""Filters of a layer that are drawn, those in its middle."""
_INPUTS = 6
"""The inputs whose kernels are drawn."""


def is_drawn_here(name: str) -> bool:
    """Whether a metric has figures of its own here, so that it needs none among the others."""
    return name in (HAMMING, SIMILARITY, CORRELATION) or _GROUP.fullmatch(name) is not None


def by_retention(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """For each accuracy the last mean of the clients of one retention ratio, over the ratios; a line a run."""
    figures = []
    for name in names:
        lines = []
        for style, group in enumerate(groups):
            found = {
                float(match[2]): last.mean[-1]
                for other in metric_names(group.runs[0])
                if (match := _GROUP.fullmatch(other)) and match[1] == name and (last := curve(group, other))
            }
            if found:
                ratios = sorted(found)
                over = {"Retention ratio": np.array(ratios)}
                lines.append(Line(group.label, style, over, np.array([found[one] for one in ratios])))
        if lines:
            caption = "The mean over the clients that keep the same share of the model, at the last evaluation."
            chart = lines_chart(lines, "Accuracy, %", percent=True)
            figures.append(Figure(f"By retention ratio: {title(name)}", caption, chart, legend=len(groups) > 1))
    return figures


def mask_section(groups: Sequence[Group]) -> Section:
    """How far masks lie apart, and the masks of a single run; without figures where there are none."""
    sentences = []
    for group in groups:
        found = [last.final for run in group.runs if (last := series(run, CORRELATION)) is not None]
        if found:
            name = f"{group.label}: " if len(groups) > 1 else ""
            sentences.append(f"{name}{np.mean(found):.2f}")
    intro = "A distance is the share of entries that one client keeps and the other does not. "
    if sentences:
        intro += f"Its correlation with the likeness of labels, over pairs of clients: {'; '.join(sentences)}."
    alone = groups[0].runs[0] if len(groups) == 1 and len(groups[0].runs) == 1 else None
    figures = _distances(groups) if alone is None else [*_matrices(alone), *_drawn(alone)]
    return Section("Masks", intro.strip(), figures)


def _distances(groups: Sequence[Group]) -> list[Figure]:
    """The distances of all pairs, a row a group."""
    strips = []
    for style, group in enumerate(groups):
        found = [one.last for run in group.runs if (one := spread(run, HAMMING)) is not None]
        if found:
            strips.append(Strip(group.label, style, np.concatenate(found)))
    if not strips:
        return []
    chart = strips_chart(strips, "Distance of two clients' masks", percent=True)
    return [Figure("Distances of masks", "Each dot is a pair of clients after the last round.", chart)]


def _matrices(run: Run) -> list[Figure]:
    """Likeness of labels and distance of masks, client by client."""
    shown = (
        (SIMILARITY, "Likeness of labels", "The cosine between two clients' training labels: 1 is dark, 0 light.", 1.0),
        (
            HAMMING,
            "Distance of masks",
            "Dark pairs keep different entries, light ones the same; darkest: {:.3f}.",
            0,
        ),
    )
    figures = []
    for name, heading, caption, own in shown:
        found = spread(run, name)
        size = 0 if found is None else round((1 + np.sqrt(1 + 4 * len(found.last))) / 2)
        if found is None or not 1 < size <= _MOST_CLIENTS or size * (size - 1) != len(found.last):
            continue
        matrix = np.full((size, size), float(own))
        matrix[~np.eye(size, dtype=bool)] = found.last
        most = 1.0 if own else float(matrix.max())
        chart = cells_chart(matrix, "Client", "Other client", most, heading)
        figures.append(Figure(heading, caption.format(most), chart))
    return figures


def _drawn(run: Run) -> list[Figure]:
    """What the first clients keep of the first layer that is not kept whole, from the saved personal models."""
    paths = model_files(run.directory, "personal")
    if not paths:
        return []
    # The first clients are in the first file.
    path = paths[0]
    try:
        require_regular(path)
        with safe_open(path, "numpy") as models:
            shapes = {name: tuple(models.get_slice(name).get_shape()) for name in models.keys()}  # noqa: SIM118
            clients = sorted({int(name.partition("/")[0]) for name in shapes})[:_DRAWN]
            layers = _layers({n.partition("/")[2]: s for n, s in shapes.items() if n.startswith(f"{clients[0]}/")})
            for layer in layers:
                kept = {client: models.get_tensor(f"{client}/{layer}") != 0 for client in clients}
                if not all(mask.all() for mask in kept.values()):
                    return [_mask_figure(client, layer, mask) for client, mask in kept.items()]
    except (OSError, ValueError, IndexError, SafetensorError):
        # A page is worth more than a picture of a damaged file.
        pass
    return []


def _mask_figure(client: int, layer: str, mask: np.ndarray) -> Figure:
    chart = cells_chart(_picture(mask), "Outputs", "Inputs", 1.0, "Kept")
    caption = "Dark: kept. Across the outputs, down the inputs; the middle outputs, the first inputs."
    return Figure(f"Client {client}: {mask.mean():.1%} of {layer}", caption, chart)


def _layers(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Convolutions first, those of the fewest inputs before others, then matrices likewise."""
    layers = [name for name, shape in shapes.items() if len(shape) in (2, 4)]
    return sorted(layers, key=lambda name: (-len(shapes[name]), shapes[name][1], name))


def _picture(mask: np.ndarray) -> np.ndarray:
    """A layer's mask [outputs, inputs, ...] as rows of inputs and columns of outputs, kernels with blanks between."""
    first = max(0, (len(mask) - _FILTERS) // 2)
    few = mask[first : first + _FILTERS].astype(np.float64)
    if few.ndim == 2:
        return few.T[: 2 * _FILTERS]
    few = np.pad(few[:, :_INPUTS], [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    outputs, inputs, height, width = few.shape
    return few.transpose(1, 2, 0, 3).reshape(inputs * height, outputs * width)[:-1, :-1]
