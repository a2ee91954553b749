"""Data in files: mapped by actors that have them, and sent where they are gone. The bits are the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors import session, setups
from actors.errors import ClusterError
from rayfl.data.mapped import mapped
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from tests.actors.toys import assert_same_bits, experiment, logged, played
from tests.refusals import check_sentence, refused

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """The experiment with its train inputs in a file."""
    plain = prepare(experiment(rounds=2))
    np.save(tmp_path / "inputs.npy", plain.dataset.train.inputs)
    train = replace(plain.dataset.train, inputs=mapped(tmp_path / "inputs.npy"))
    return replace(plain, dataset=replace(plain.dataset, train=train))


def test_actors_map_the_files_or_are_sent_the_data(
    setup: Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rayfl")
    records, run_state = played(setup, InlineExecutor(setup))
    reference = setups.put_setup(setup)
    assert isinstance(setups.read_setup(reference).dataset.train.inputs.base, np.memmap)
    for sent in (False, True):
        if sent:
            (tmp_path / "inputs.npy").rename(tmp_path / "elsewhere.npy")
            with refused(names=[tmp_path, "node"], error=setups.FilesMissing):
                setups.read_setup(reference)
            with refused(names=[tmp_path, "coordinator", "restore"], error=ClusterError):
                setups.put_whole(reference)
        # The setup of this process has mapped the file already, which is why it outlives its name.
        with session.executor(setup, Runtime(actors=2)) as executor:
            others, other = played(setup, executor)
        assert others == records
        assert_same_bits(run_state, other)
    assert not logged(caplog)


def test_a_node_without_the_files_is_sent_the_data(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rayfl")
    records, run_state = played(setup, InlineExecutor(setup))
    reference = setups.put_setup(setup)
    # The coordinator has mapped the file; the actors come when it is gone.
    whole = setups.read_setup(reference)
    (tmp_path / "inputs.npy").unlink()
    monkeypatch.setattr(setups, "read_setup", lambda reference: whole)
    monkeypatch.setattr(session, "put_setup", lambda setup: reference)
    with session.executor(setup, Runtime(actors=2)) as executor:
        others, other = played(setup, executor)
    assert others == records
    assert_same_bits(run_state, other)
    (sentence,) = logged(caplog)
    check_sentence(sentence, [tmp_path, "node"])
