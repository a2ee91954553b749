"""A partition as counts, as a picture and as a table, for `rayfl data`."""

import io

import numpy as np
from rich.table import Table

from rayfl.data.datasets import Dataset
from rayfl.data.partition import Partition
from rayfl.data.partitions.matching_test_split import label_counts
from rayfl.errors import RayflError
from rayfl.run_directory.output_files import WRITTEN_BY

SPLITS = ("train", "validation", "heldout", "test")
COLOURS = {"train": "#2b6c8f", "validation": "#e0a030", "heldout": "#b5533c"}
MOST_BUBBLES = 1200
"""The most cells (clients x classes) drawn as bubbles; beyond, a heat map is easier to read."""


def holdings(dataset: Dataset, partition: Partition) -> np.ndarray:
    """Train samples of each class that each client holds, int64 [num_clients, num_classes].

    ValueError if the labels are no classes (regression).
    """
    if not np.issubdtype(dataset.train.labels.dtype, np.integer):
        raise RayflError(
            f"dataset {dataset.name!r} has no classes to count: its labels are {dataset.train.labels.dtype}"
        )
    return label_counts(dataset.train.labels, partition.train, dataset.num_classes)


def distances(counts: np.ndarray) -> np.ndarray:
    """Total variation distance of each client's label distribution to the pooled one, float64 [num_clients] in [0, 1].

    counts: [num_clients, num_classes], with at least one sample in each row.
    """
    own = counts / counts.sum(axis=1, keepdims=True)
    pooled = counts.sum(axis=0) / counts.sum()
    return 0.5 * np.abs(own - pooled).sum(axis=1)


def table(dataset: Dataset, partition: Partition, max_rows: int = 100) -> Table:
    """A rich table with a row a client: sizes of the splits in use, label counts, distance to the pooled labels.

    Beyond `max_rows` clients the first ones are shown, and the caption says how many are left out.
    """
    counts = holdings(dataset, partition)
    far = distances(counts)
    sizes = {split: partition.split(split).sizes for split in SPLITS}
    splits = [split for split in SPLITS if sizes[split].any()]
    shown = min(max_rows, len(counts))
    left_out = f", {len(counts) - shown} of them not shown" if shown < len(counts) else ""
    result = Table(
        title=f"{dataset.name}: {len(counts)} clients{left_out}",
        caption="labels: class:count in the train split, most frequent first; distance: total variation between a "
        "client's train labels and those of all clients, from 0 (alike) to 1 (disjoint)",
        show_footer=True,
    )
    result.add_column("client", footer="all", justify="right")
    for split in splits:
        result.add_column(split, footer=str(sizes[split].sum()), justify="right")
    result.add_column("classes", footer=str(np.count_nonzero(counts.sum(axis=0))), justify="right")
    result.add_column("labels", footer=_label_text(counts.sum(axis=0)), overflow="fold", ratio=1)
    result.add_column("distance", footer=f"mean {far.mean():.2f}", justify="right")
    for client in range(shown):
        row = [str(client), *(str(sizes[split][client]) for split in splits)]
        row += [str(np.count_nonzero(counts[client])), _label_text(counts[client]), f"{far[client]:.2f}"]
        result.add_row(*row)
    return result


def picture(dataset: Dataset, partition: Partition, image_format: str = "png") -> bytes:
    """Draw the partition: above, the samples of each client; below, those of each class.

    Bubbles (area proportional to the count) for few clients and classes, a heat map for many. `image_format` is "png"
    or "svg"; the same partition gives the same bytes.
    """
    # Importing matplotlib takes half a second, and only this function needs it.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if image_format not in ("png", "svg"):
        raise RayflError(f"image_format={image_format!r} is not known: give 'png' or 'svg'")
    counts = holdings(dataset, partition)
    num_clients, num_classes = counts.shape
    width = float(np.clip(3.0 + 0.16 * num_clients, 7.0, 20.0))
    height = float(np.clip(3.0 + 0.28 * num_classes, 4.5, 14.0))
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.4, height - 2.0]})
    _draw_sizes(above, partition)
    _draw_counts(below, counts)
    above.set_title(f"{dataset.name}: {num_clients} clients, mean distance {distances(counts).mean():.2f}", loc="left")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "rayfl"}):
        # By these rayfl knows its own pictures: run_directory/output_files.py.
        mark = {"Software": WRITTEN_BY} if image_format == "png" else {"Date": None, "Creator": WRITTEN_BY}
        figure.savefig(buffer, format=image_format, metadata=mark)
    return buffer.getvalue()


# Any for the axes: matplotlib is imported only where it draws.
def _draw_sizes(axes, partition: Partition) -> None:  # noqa: ANN001
    """Stacked bars: train, validation and heldout samples of each client."""
    floor = np.zeros(len(partition.train))
    clients = np.arange(len(partition.train))
    for split, colour in COLOURS.items():
        sizes = partition.split(split).sizes
        if sizes.any():
            if len(clients) <= 300:
                axes.bar(clients, sizes, bottom=floor, color=colour, width=0.85, label=split)
            else:
                # Bars thinner than a pixel are slow and pale: one shape without gaps instead.
                edges = np.arange(len(clients) + 1) - 0.5
                axes.stairs(floor + sizes, edges, baseline=floor.copy(), fill=True, color=colour, label=split)
            floor += sizes
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize="small", ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False)


def _draw_counts(axes, counts: np.ndarray) -> None:  # noqa: ANN001
    """Train samples by client and class."""
    num_clients, num_classes = counts.shape
    if counts.size <= MOST_BUBBLES:
        client, label = np.nonzero(counts)
        axes.scatter(client, label, s=_areas(axes, counts)[client, label], color=COLOURS["train"], linewidths=0)
        axes.grid(color="0.93")
        axes.set_axisbelow(True)
        axes.set_ylim(num_classes - 0.4, -0.6)
    else:
        image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
        axes.figure.colorbar(image, ax=axes, label="samples", orientation="horizontal", fraction=0.06, aspect=60)
    axes.set_xlim(-0.6, num_clients - 0.4)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=25)
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=25)
    axes.set_xlabel("client")
    axes.set_ylabel("class")


def _areas(axes, counts: np.ndarray) -> np.ndarray:  # noqa: ANN001
    """Bubble areas in square points, the largest as wide as a cell."""
    width, height = axes.figure.get_size_inches()
    cell = 72 * min((width - 1.2) / counts.shape[0], (height - 2.8) / counts.shape[1])
    return counts / counts.max() * (0.95 * min(cell, 30.0)) ** 2


def _label_text(counts: np.ndarray) -> str:
    """The classes held, the most frequent first, at most twelve of them."""
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    text = " ".join(f"{label}:{counts[label]}" for label in order[:12])
    return text if len(order) <= 12 else f"{text} and {len(order) - 12} more"
