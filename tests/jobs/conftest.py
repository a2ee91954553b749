"""Reports without the drawing."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are empty. To draw them takes nine tenths of a small sweep's time; what they show is read as ever."""
    monkeypatch.setattr(Figure, "savefig", lambda self, out, **options: out.write('<svg viewBox="0 0 1 1"></svg>'))
