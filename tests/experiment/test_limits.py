"""What an experiment's file, an override and a sweep may not be, however Python would take it."""

import os
from pathlib import Path

import pytest

from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.runtime import Runtime
from rayfl.experiment.sweep import MOST_COMBINATIONS, read_sweep
from tests.experiment.test_experiment import BASE, experiment_of
from tests.refusals import refused

TEXT = (
    'rounds = 1\ndata = "digits"\npartition = "iid"\nmodel = "mlp"\nclients = {count = 2}\n'
    'method = {name = "fedavg", lr = 0.1}\n'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.toml").write_text(TEXT)
    return tmp_path / "a.toml"


def test_a_byte_order_mark_is_no_part_of_a_file(file: Path):
    file.write_bytes("\N{BOM}".encode() + TEXT.encode())
    assert read(file).rounds == 1


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, ["a.toml", "at most 32"]),
        ("x = " + "[" * 100 + "]" * 100, ["x...", "32 tables"]),
        (".".join("abc"[i % 3] for i in range(900)) + " = 1", ["a.b.c", "32"]),
        (".".join("abc"[i % 3] for i in range(9000)) + " = 1", ["a.toml", "at most 32"]),
        ("seed = " + "9" * 5000, ["a.toml", "more than 64"]),
        ("seed = 0x" + "f" * 5000, ["seed", "64 bits"]),
        ("seed = 9223372036854775808", ["seed", "64 bits"]),
        ('output.directory = "a\\u0000b"', ["output.directory", "null character"]),
        ('[data]\nname = "fashion-mnist"\nroot = "a\\u0000b"', ["data.root", "null character"]),
    ],
)
def test_what_python_takes_and_no_setting_does(file: Path, line: str, names: list[str]):
    text = TEXT.replace('data = "digits"\n', "") if line.startswith("[data]") else TEXT
    file.write_text(text + line)
    with refused(names=names):
        read(file)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("data.dim=" + "9" * 5000, ["9" * 76 + "...", "64 bits"]),
        ("data.dim=0x" + "f" * 5000, ["data.dim", "64 bits"]),
        ("model.hidden=" + "[" * 5000 + "]" * 5000, ["at most 32", "tables", "lists"]),
        ("model.hidden=" + "[" * 40 + "]" * 40, ["model.hidden", "32"]),
        (".".join("a" * 5000) + "=1", ["a.a", "32 tables"]),
        ("x" * 5000, ["...", "key=value"]),
    ],
)
def test_what_an_override_may_not_be(file: Path, override: str, names: list[str]):
    with refused(names=names):
        read(file, [override])


def test_only_regular_files_are_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.toml")
    with refused(names=["pipe.toml", "pipe", "TOML"]):
        read(tmp_path / "pipe.toml")
    (tmp_path / "link.toml").symlink_to("gone.toml")
    with refused(names=["link.toml", "link", "gone.toml"]):
        read(tmp_path / "link.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * 1_000_001)
    with refused(names=["big.toml", "1.0 MB"]):
        read(tmp_path / "big.toml")


def test_a_home_that_nobody_knows(file: Path):
    file.write_text(TEXT.replace('data = "digits"', 'data = {name = "arrays", path = "~nobody-there/x.npz"}'))
    with refused(names=["~nobody-there/x.npz", "home folder", "without ~"]):
        read(file)


def test_a_name_must_fit_a_file_system():
    with refused(names=["name=", "at most 200"]):
        experiment_of({"name": "x" * 300})


def test_a_long_file_name_is_cut(tmp_path: Path):
    path = tmp_path / ("x" * 240 + ".toml")
    path.write_text(TEXT)
    assert read(path).name == "x" * 200


@pytest.mark.parametrize(
    ("runtime", "names"),
    [
        ({"device": "cuda"}, ["runtime.device='cuda'", "GPU", "runtime.num_gpus"]),
        ({"num_gpus": 1.5}, ["runtime.num_gpus=1.5", "several GPUs", "below 1", "more actors"]),
        ({"num_gpus": 2}, ["runtime.num_gpus=2", "several GPUs", "below 1", "more actors"]),
        ({"num_gpus": 0.00001}, ["runtime.num_gpus=1e-05", "Ray", "at least 0.0001"]),
        ({"precision": "tf32"}, ["runtime.precision='tf32'", "GPUs", "device", "cpu", "fp32", "bf16"]),
        ({"threads": 10**9}, ["runtime.threads=1000000000", "[1, 1024]"]),
        ({"call_timeout_s": 1e300}, ["runtime.call_timeout_s=1e+300", "(0, 1e+09]"]),
    ],
)
def test_what_no_machine_could_give(runtime: dict, names: list[str]):
    with refused(names=names):
        experiment_of({"runtime": runtime})
    assert Runtime(device="cuda", executor="inline", precision="tf32").device_name == "cuda"


def test_a_sweep_of_billions_is_refused_at_once(file: Path):
    lists = "\n".join(f'"runtime.{key}" = {list(range(1, 1001))}' for key in ("actors", "threads", "stack_width"))
    file.write_text(f"{TEXT}\n[sweep]\n{lists}\n")
    with refused(names=["1,000,000,000 combinations"]):
        read_sweep(file)
    assert MOST_COMBINATIONS == 10_000


def test_python_gets_the_same_sentences():
    with refused(names=["clients.count", "64 bits"]):
        Experiment(**{**BASE, "clients": {"count": 10**30}})
