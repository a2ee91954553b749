"""States survive the way through a file to the last bit, and a file can make nothing but states."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rayfl import tree
from rayfl.compress.base import Compressor, Packet
from rayfl.run_directory.disk import DamagedFile
from rayfl.run_directory.states import load_states, save_states
from tests.contracts.every_compressor import every_compressor
from tests.refusals import refused

STATE = {
    "params": {"fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3, dtype=torch.float64)},
    "mask": {"fc.weight": torch.tensor([[True, False, True]] * 3)},
    "count": torch.tensor(7),
    "nothing": {},
    "empty": torch.zeros(0),
    "bytes": {"update 3": torch.arange(5, dtype=torch.uint8)},
}


def test_a_state_comes_back_as_it_was(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    save_states(path, {"12": tree.to_arrays(STATE), "3": {}})
    read = dict(load_states(path))
    assert list(read) == ["12", "3"] and read["3"] == {}
    found = tree.to_tensors(read["12"])
    assert list(found) == list(STATE) and found["nothing"] == {}
    before, after = tree.flatten(STATE), tree.flatten(found)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape
        assert torch.equal(after[name], tensor), name


def test_names_that_look_like_paths_do_not_collide(tmp_path: Path):
    state = {"a/b": np.ones(2), "a": {"b": np.zeros(2)}}
    save_states(tmp_path / "file", {"0": state})
    ((_, read),) = load_states(tmp_path / "file")
    assert read["a/b"].tolist() == [1, 1] and read["a"]["b"].tolist() == [0, 0]


@every_compressor
def test_every_packet_comes_back_as_it_was(compressor: Compressor, tmp_path: Path):
    x = {"a": torch.randn(5, 7), "b": torch.randn(3)}
    packet, _ = compressor.encode(x, compressor.init(x), np.random.default_rng(0))
    save_states(tmp_path / "file", {"0": {"packets": {"3": packet}}})
    ((_, state),) = load_states(tmp_path / "file")
    read = state["packets"]["3"]
    assert isinstance(read, Packet) and read.num_bits == packet.num_bits and read.codec == packet.codec
    for name, tensor in packet.decode().items():
        assert torch.equal(read.decode()[name], tensor)


def require_refused(codec: str, folder: Path) -> None:
    """A state file with a packet of this codec is damaged."""
    layout = {"0": {"tree": {"p": {"packet": {"codec": codec, "settings": {}}, "parts": {}}}}}
    save_file({"x": np.zeros(1)}, folder / "file", {"layout": json.dumps(layout)})
    with refused(names=[folder / "file"], error=DamagedFile):
        list(load_states(folder / "file"))


@pytest.mark.parametrize(
    "codec", ["os.system", "base.Packet", "sparse.TopK", "sparse.np", "..determinism.process.prepare_process", "x.y"]
)
def test_a_file_names_codecs_and_nothing_else(codec: str, tmp_path: Path):
    require_refused(codec, tmp_path)


def test_a_file_makes_nothing_of_modules_that_brought_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[object] = []

    @dataclass
    class Loud:
        def __post_init__(self) -> None:
            made.append(self)

    Loud.__module__ = "stranger"
    module = ModuleType("stranger")
    monkeypatch.setattr(module, "Loud", Loud, raising=False)
    monkeypatch.setitem(sys.modules, "stranger", module)
    require_refused("stranger:Loud", tmp_path)
    assert made == []


def test_what_is_no_state_file_is_called_damaged(tmp_path: Path):
    for content in (b"", b"abc", b"\xff" * 100):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DamagedFile):
            list(load_states(tmp_path / "file"))
    save_file({"x": np.zeros(1)}, tmp_path / "file")
    with pytest.raises(DamagedFile):
        list(load_states(tmp_path / "file"))
