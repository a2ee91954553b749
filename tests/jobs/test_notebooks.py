"""The notebooks of jobs/examples run from their first cell to their last, in a kernel of their own."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def played(name: str, folder: Path) -> list[Any]:
    """The outputs of a notebook's cells, run in `folder`. CellExecutionError where one fails."""
    notebook = nbformat.read(ROOT / "jobs" / "examples" / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are made anew, and not kept"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_plots", "words"),
    [
        ("compare_methods", 2, "4 runs"),
        ("own_model", 1, "of all points after 5 rounds"),
        ("gradient_leakage", 1, "one example: likeness 1.00"),
    ],
)
def test_a_notebook_runs(name: str, num_plots: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    outputs = played(name, tmp_path)
    assert sum("image/png" in one.get("data", {}) for one in outputs) == num_plots
    texts = [one.get("text", "") + one.get("data", {}).get("text/plain", "") for one in outputs]
    assert any(words in text for text in texts)
    assert not [text for text in texts if "Warning" in text or "ipywidgets" in text]
