"""Plots with their captions, under headings."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rayfl.report.plots.lines import Key


@dataclass(frozen=True)
class Figure:
    """A plot with its title, legend (empty for a single line) and caption."""

    title: str
    caption: str
    svg: Markup
    legend: Sequence[Key] = ()
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """Plots under one heading."""

    title: str
    intro: str
    figures: Sequence[Figure]

    @property
    def legend(self) -> Sequence[Key]:
        """The legend that all figures share, to be shown once; empty if they differ."""
        first = self.figures[0].legend
        return first if all(figure.legend == first for figure in self.figures) else ()
