"""The charts' JavaScript: kept where that is possible, made anew where what is kept was cut."""

from pathlib import Path

import pytest

from rayfl.report import page
from tests.refusals import refused

MADE = 'var tag = "</script><!--";'
SAFE = 'var tag = "<\\/script><\\!--";'


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often it was made."""
    calls: list[int] = []
    monkeypatch.setattr(page, "converted", lambda code: calls.append(1) or MADE.encode())
    return calls


def test_it_is_made_once_and_again_where_the_file_is_gone(tmp_path: Path, monkeypatch, made):
    monkeypatch.setattr(page, "CACHE", tmp_path)
    again = page.vega_javascript.__wrapped__
    assert again() == again() and again().startswith(SAFE) and len(made) == 1
    (file,) = (tmp_path / "charts").iterdir()
    file.unlink()
    assert again().startswith(SAFE) and len(made) == 2


def test_it_does_without_a_place_for_it(tmp_path: Path, monkeypatch, made):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("~nobody-of-this-name")):
        monkeypatch.setattr(page, "CACHE", place)
        assert page.vega_javascript.__wrapped__().startswith(SAFE)


def test_a_failure_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(page.sys, "executable", "/bin/false")
    with refused(names=["code 1", "vl-convert-python"]):
        page.converted("")
