"""A plugin file and an experiment that names it."""

from pathlib import Path

import pytest

METHOD = '''
from pydantic import Field

from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining


class Halved(FedAvg):
    """FedAvg with an option of its own."""

    class Hyper(LocalTraining):
        half: float = Field(default=0.5, gt=0, description="the half")

    paper = "None et al., 2026"


class NoMethod:
    pass


def function():
    pass
'''


EXPERIMENT = """
rounds = 2
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 3}
method = {name = "mine.py:Halved", lr = 0.1}
checkpoint = {every = 1}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin file and an experiment in a folder that is not the current one."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text(METHOD)
    (folder / "own.toml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return folder
