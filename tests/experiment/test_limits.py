"""What an experiment's file, an override and a sweep may not be, however Python would take it."""

import os
from pathlib import Path

import pytest

from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment, Runtime, read
from rayfl.experiment.sweep import MOST_COMBINATIONS, read_sweep
from tests.experiment.test_experiment import BASE, experiment_of

TEXT = (
    'rounds = 1\ndata = "digits"\npartition = "iid"\nmodel = "mlp"\nclients = {count = 2}\n'
    'method = {name = "fedavg", lr = 0.1}\n'
)


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(RayflError) as caught:
        read(path, overrides)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.toml").write_text(TEXT)
    return tmp_path / "a.toml"


def test_a_byte_order_mark_is_no_part_of_a_file(file: Path):
    file.write_bytes("\N{BOM}".encode() + TEXT.encode())
    assert read(file).rounds == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "a.toml has tables or lists nested too deep; at most 32 may be"),
        ("x = " + "[" * 100 + "]" * 100, "x... is nested deeper than 32 tables and lists; use fewer"),
        (".".join("abc"[i % 3] for i in range(900)) + " = 1", "a.b.c... is nested deeper than 32 tables and lists"),
        (".".join("abc"[i % 3] for i in range(9000)) + " = 1", "a.toml has keys nested too deep; at most 32 tables"),
        ("seed = " + "9" * 5000, "a.toml has a whole number of more than 64 bits; give a smaller one"),
        ("seed = 0x" + "f" * 5000, "seed is a whole number of more than 64 bits; give a smaller one"),
        ("seed = 9223372036854775808", "seed is a whole number of more than 64 bits"),
        ('output.directory = "a\\u0000b"', "output.directory has a null character; leave it out"),
        ('[data]\nname = "fashion-mnist"\nroot = "a\\u0000b"', "data.root has a null character"),
    ],
)
def test_what_python_takes_and_no_setting_does(file: Path, line: str, sentence: str):
    text = TEXT.replace('data = "digits"\n', "") if line.startswith("[data]") else TEXT
    file.write_text(text + line)
    assert sentence in refusal(file)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.dim=" + "9" * 5000, "'" + "9" * 76 + "... has a whole number of more than 64 bits"),
        ("data.dim=0x" + "f" * 5000, "data.dim is a whole number of more than 64 bits; give a smaller one"),
        ("model.hidden=" + "[" * 5000 + "]" * 5000, "has tables or lists nested too deep; at most 32 may be"),
        ("model.hidden=" + "[" * 40 + "]" * 40, "model.hidden... is nested deeper than 32 tables and lists"),
        (".".join("a" * 5000) + "=1", "is nested deeper than 32 tables; use fewer"),
        ("x" * 5000, "is not an override; write key=value"),
    ],
)
def test_what_an_override_may_not_be(file: Path, override: str, sentence: str):
    assert sentence in refusal(file, override)


def test_only_regular_files_are_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert refusal(tmp_path / "pipe.toml").endswith(
        "pipe.toml cannot be read (it is a pipe, and only regular files are opened); give the path of an experiment's "
        "TOML file"
    )
    (tmp_path / "link.toml").symlink_to("gone.toml")
    assert "link.toml cannot be read (it is a link to gone.toml, which is not there); give" in refusal(
        tmp_path / "link.toml"
    )
    (tmp_path / "big.toml").write_bytes(b"#" * 1_000_001)
    assert "it has 1.0 MB, which is more than the 1.0 MB that it may have" in refusal(tmp_path / "big.toml")


def test_a_home_that_nobody_knows(file: Path):
    file.write_text(TEXT.replace('data = "digits"', 'data = {name = "arrays", path = "~nobody-there/x.npz"}'))
    assert refusal(file) == "~nobody-there/x.npz: nobody knows the home folder ~nobody-there; give a path without ~"


def test_a_name_must_fit_a_file_system():
    with pytest.raises(RayflError, match=r"^name='xx.*\.\.\. has 300 letters; use at most 200$"):
        experiment_of({"name": "x" * 300})


def test_a_long_file_name_is_cut(tmp_path: Path):
    path = tmp_path / ("x" * 240 + ".toml")
    path.write_text(TEXT)
    assert read(path).name == "x" * 200


@pytest.mark.parametrize(
    ("runtime", "sentence"),
    [
        ({"device": "cuda"}, "runtime.device='cuda' needs a share of a GPU for every actor; set runtime.num_gpus"),
        ({"num_gpus": 1.5}, "runtime.num_gpus=1.5 an actor is not allowed; give a share below 1, or a whole number"),
        ({"num_gpus": 0.00001}, "runtime.num_gpus=1e-05 an actor is less than Ray can count; give at least 0.0001"),
        ({"precision": "tf32"}, "runtime.precision='tf32' is for GPUs, and the device is 'cpu'; use 'fp32', or 'bf16'"),
        ({"threads": 10**9}, "runtime.threads=1000000000 is not allowed; it must be a whole number in [1, 1024]"),
        ({"call_timeout_s": 1e300}, "runtime.call_timeout_s=1e+300 is not allowed; it must be a number in (0, 1e+09]"),
    ],
)
def test_what_no_machine_could_give(runtime: dict, sentence: str):
    with pytest.raises(RayflError) as caught:
        experiment_of({"runtime": runtime})
    assert str(caught.value).startswith(sentence)
    assert Runtime(device="cuda", executor="inline", precision="tf32").device_name == "cuda"


def test_a_sweep_of_billions_is_refused_at_once(file: Path):
    lists = "\n".join(f'"runtime.{key}" = {list(range(1, 1001))}' for key in ("actors", "threads", "stack_width"))
    file.write_text(f"{TEXT}\n[sweep]\n{lists}\n")
    with pytest.raises(RayflError, match=r"^the sweep has 1,000,000,000 combinations \(1000 x 1000 x 1000\); give"):
        read_sweep(file)
    assert MOST_COMBINATIONS == 10_000


def test_python_gets_the_same_sentences():
    with pytest.raises(RayflError, match=r"^clients\.count is a whole number of more than 64 bits"):
        Experiment(**{**BASE, "clients": {"count": 10**30}})
