"""Charts with their captions, under headings."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfl.report.charts import Chart, Key, key


@dataclass(frozen=True)
class Figure:
    """A chart with its title and caption. `legend`: whether its series need one, as the axes do not name them."""

    title: str
    caption: str
    chart: Chart
    legend: bool = False
    wide: bool = False

    @property
    def keys(self) -> Sequence[Key]:
        """The entries of its legend."""
        return [key(label, style) for label, style in self.chart.styles.items()] if self.legend else []

    @property
    def remark(self) -> str:
        """The caption, and the lines that lie upon others."""
        names = [line.label for line, depth in zip(self.chart.lines, self.chart.coinciding, strict=True) if depth]
        if not names:
            return self.caption
        return f"{self.caption} Dashed, because it lies upon another line: {', '.join(names)}.".strip()


@dataclass(frozen=True)
class Section:
    """Figures under one heading."""

    title: str
    intro: str
    figures: Sequence[Figure]

    @property
    def legend(self) -> Sequence[Key]:
        """The legend that all figures share, to be shown once; empty if they differ."""
        first = self.figures[0].keys
        return first if all(figure.keys == first for figure in self.figures) else ()
