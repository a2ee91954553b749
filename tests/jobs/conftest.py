"""Reports without the drawing."""

import pytest

from rayfl.report import page


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have no charts, which take most of a small sweep's time; the tables around them are as ever."""
    monkeypatch.setattr(page, "sections", lambda *given: [])
