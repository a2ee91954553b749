"""What a run says that fails in its first round, at the server, or after its last round."""

import warnings
from pathlib import Path

import pytest

from rayfl.wrappers.differential_privacy import epsilon
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence

TABLE = """
rounds = 3
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "fedavg", steps = 1}
runtime = {executor = "inline"}
output = {report = false}
"""


def written(folder: Path) -> Path:
    (folder / "a.toml").write_text(TABLE)
    return folder / "a.toml"


@pytest.mark.parametrize(
    "settings",
    [
        ["method.lr=1e38"],
        ["method.lr=3e37", "uplink=countsketch"],
        ["method.lr=1e37", "downlink=topk"],
        ["method={name='fedavgm', lr=1e38, steps=1}"],
    ],
)
def test_numbers_that_overflow_at_the_server_get_the_words_of_a_client(settings: list[str], tmp_path: Path):
    result = rayfl("run", written(tmp_path), "--output", tmp_path / "run", *settings)
    assert result.exit_code == 1
    check_sentence(result.stderr.splitlines()[-1], ["round ", "'1.weight'", "NaN or infinity", "learning rate"])
    assert "did not expect" not in result.stderr and "resume" not in result.stderr


MINE = """
from rayfl.methods.server.fedavg import FedAvg


class Wide(FedAvg):
    def server_update(self, *given):
        server, metrics = super().server_update(*given)
        return {**server, "params": {name: tensor.double() for name, tensor in server["params"].items()}}, metrics


class Fails(FedAvg):
    def server_update(self, server, received, delivered, ctx):
        raise KeyError(ctx.round)
"""


@pytest.mark.parametrize(("name", "facts"), [("Wide", ["float64", "float32", "'1.weight'"]), ("Fails", ["KeyError"])])
def test_an_error_in_round_0_names_it_and_advises_no_resume(name: str, facts: list[str], tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    settings = [f"method={tmp_path}/mine.py:{name}"]
    result = rayfl("run", written(tmp_path), "--output", tmp_path / "run", *settings)
    assert result.exit_code == 1
    check_sentence(result.stderr.splitlines()[-1], ["round 0", f"{name}.server_update", *facts])
    assert "resume" not in result.stderr and "kept" not in result.stderr


def test_a_tiny_noise_has_a_bound_and_no_warning_of_opacus():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small, large = (epsilon(noise, 1.0, 10, 1e-5) for noise in (1e-3, 1e4))
    assert small > 1e6 and 0 < large < 1
