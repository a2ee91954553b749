"""The benchmark `rounds` beside others: the same work as files, proof of the work, and missing packages."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import rounds
from benchmarks.peers import bare
from benchmarks.peers.work import Plan, Tally, Work, size
from benchmarks.workloads import WORKLOADS, Workload
from rayfl.determinism.process import prepare_process, variables
from rayfl.experiment.prepare import prepare
from rayfl.models.base import laid_out
from tests.benchmarks.commands import benchmark
from tests.refusals import refused

PLAN = Plan("tiny", (), (4,), 64 * 4 + 4 + 4 * 10 + 10, "contiguous", 0.1, 4, 2, None, 2, 3, 1)


@pytest.fixture(scope="module")
def tiny() -> Work:
    """Three clients of 6 examples of 8x8 pixels; two a round for two epochs in batches of 4."""
    draw = np.random.default_rng(0)
    inputs, labels = draw.standard_normal((20, 1, 8, 8), np.float32), draw.integers(0, 10, 20)
    selected = np.array([[0, 1], [1, 2], [0, 2]])
    return Work(PLAN, inputs, labels, np.arange(18)[::-1].copy(), np.array([0, 6, 12, 18]), selected)


def on_digits(workload: Workload) -> Workload:
    """The same on data that every machine has."""

    class OnDigits(Workload):
        def experiment(self, **runtime: object):
            table = {**super().experiment(**runtime).as_dict(), "data": "digits"}
            return type(super().experiment())(**{**table, "clients": {"count": 10, "per_round": 4}})

    return OnDigits(**{**asdict(workload), "rounds": 2, "warmup": 1})


def test_the_files_hold_the_work(tiny: Work, tmp_path: Path):
    tiny.write(tmp_path)
    found = Work.read(tmp_path)
    assert found.plan == PLAN and found.num_clients == 3
    for name in ("inputs", "labels", "indices", "offsets", "selected"):
        assert np.array_equal(getattr(found, name), getattr(tiny, name))
    assert found.rows(1).tolist() == [11, 10, 9, 8, 7, 6]


def test_local_work_sees_every_sample_in_every_epoch(tiny: Work):
    steps = tiny.batches(2)
    # Six examples in batches of four: two steps an epoch.
    assert [len(rows) for rows in steps] == [4, 2, 4, 2] and tiny.steps(2) == 4 and tiny.examples(2) == 12
    for epoch in (steps[:2], steps[2:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(6))
    for number, seen in ((1, 4), (2, 6), (3, 10), (5, 16)):
        some = replace(tiny, plan=replace(PLAN, epochs=None, steps=number))
        assert sum(len(rows) for rows in some.batches(0)) == some.examples(0) == seen
        assert len(some.batches(0)) == some.steps(0) == number


@pytest.mark.parametrize("name", ["W1", "W3"])
def test_the_work_is_that_of_the_workload(name: str):
    workload = on_digits(WORKLOADS[name] if name == "W3" else replace(WORKLOADS["W1x10"], model=rounds_model()))
    work, setup = rounds.files(workload), prepare(workload.experiment())
    network = work.network()
    assert [tuple(each.shape) for each in network.parameters()] == [tuple(t.shape) for t in setup.initial.values()]
    assert work.plan.num_parameters == size(network) and work.plan.per_round == 4 and len(work.selected) == 3
    assert work.num_clients == 10 * workload.copies
    for client in range(work.num_clients):
        assert work.rows(client).tolist() == setup.partition.train[client % 10].tolist()
    inputs, labels = work.tensors
    assert torch.equal(inputs, setup.dataset.prepare(setup.dataset.train.inputs))
    assert labels.tolist() == setup.dataset.train.labels.tolist()


def rounds_model() -> dict[str, object]:
    """A network of linear layers: the images of digits are too small for W1's."""
    return {"name": "mlp", "hidden": [5, 7]}


def test_the_network_is_that_of_the_workload():
    workload = WORKLOADS["W1"]
    plan = replace(PLAN, channels=(16, 32), hidden=(512,))
    work = Work(plan, np.zeros((2, 1, 28, 28), np.float32), np.zeros(2, np.int64), *[np.zeros(1, np.int64)] * 3)
    mine = work.network()
    ours = workload.experiment().model.build((1, 28, 28), 10)
    assert [(name, each.shape) for name, each in mine.named_parameters()] == [
        (name, each.shape) for name, each in ours.named_parameters()
    ]
    ours.load_state_dict(mine.state_dict())
    images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mine(images), ours(images))
    for memory_format in ("contiguous", "channels_last"):
        expected = laid_out(images, memory_format)
        found = bare.laid_out(images, memory_format)
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def done(work: Work) -> Tally:
    """A tally of exactly the work."""
    tally = Tally(work)
    for round, clients in enumerate(work.selected.tolist()):
        tally.add(1.0 + round, len(clients), sum(map(work.examples, clients)), sum(map(work.steps, clients)))
    return tally


def test_the_rounds_that_count_are_printed(tiny: Work, capsys: pytest.CaptureFixture[str]):
    done(tiny).report("1.2.3", PLAN.num_parameters)
    assert json.loads(capsys.readouterr().out) == {"seconds": [2.0, 3.0], "version": "1.2.3"}
    done(tiny).report("1.2.3", PLAN.num_parameters, peak_bytes=7)
    assert rounds.measured(capsys.readouterr().out, 9).peak_bytes == 7


@pytest.mark.parametrize("what", ["clients", "examples", "steps", "parameters", "rounds"])
def test_other_work_is_not_measured(tiny: Work, what: str, capsys: pytest.CaptureFixture[str]):
    tally, parameters = done(tiny), PLAN.num_parameters
    if what == "rounds":
        tally.add(1.0, 2, 24, 8)
    elif what == "parameters":
        parameters -= 1
    else:
        getattr(tally, what)[1] -= 1
    with refused(names=["tiny", "clients" if what == "rounds" else what], error=SystemExit):
        tally.report("1.2.3", parameters)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_the_bare_loop_does_the_work_and_has_nothing_of_rayfl(tiny: Work, tmp_path: Path):
    (tmp_path / "work").mkdir()
    tiny.write(tmp_path / "work")
    rounds.lend(tmp_path)
    # Whoever imports the real package of that name has its process prepared.
    with (tmp_path / "benchmarks" / "__init__.py").open("w") as file:
        file.write("import sys\nassert 'MKL_CBWR' not in __import__('os').environ\nsys.modules['rayfl'] = None\n")
    found = rounds.rival("bare", str(tmp_path / "work"), "2", "channels_last", scratch=tmp_path)
    assert len(found.seconds) == 2 and found.version == torch.__version__ and min(found.seconds) > 0


def test_one_bare_process_trains_as_federated_averaging_does(tiny: Work):
    # One client a round, full batches, one epoch: the average is the one model, and no shuffling can be seen.
    plan = replace(PLAN, batch_size=6, epochs=1)
    work = replace(tiny, plan=plan, selected=np.array([[0], [2]]))
    loop = bare.Bare(work, 0, 1)
    model = [each.detach().clone() for each in loop.parameters]
    network, total = work.network(), [torch.zeros_like(each) for each in model]
    network.load_state_dict(dict(zip(network.state_dict(), [each.clone() for each in model], strict=True)))
    counts = loop.share(1, model, total)
    assert counts == [1, 6, 6, 1]
    rows = work.rows(2)
    inputs, labels = work.tensors
    torch.nn.functional.cross_entropy(network(inputs[rows]), labels[rows]).backward()
    for each, before, sum_of_models in zip(network.parameters(), model, total, strict=True):
        assert each.grad is not None
        assert torch.allclose(sum_of_models, 6 * (before - plan.lr * each.grad), atol=1e-6)


def test_what_is_installed_is_found_and_what_is_no_python_refused(tmp_path: Path):
    site = tmp_path / "site"
    for package in ("flwr", "blazefl"):
        (site / f"{package}-1.0.dist-info").mkdir(parents=True)
        (site / f"{package}-1.0.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    assert rounds.installed([str(script), sys.executable]) == {"flower": str(script), "blazefl": str(script)}
    assert rounds.installed([sys.executable]) == {}
    refused(benchmark("rounds", "--peers", "--peers-python", tmp_path / "absent"), names=["absent", "Python"])
    refused(benchmark("rounds", "--peers", "--peers-python", "/bin/true"), names=["/bin/true", "Python"])
    refused(benchmark("rounds", "--peers-python", sys.executable), names=["--peers-python", "add --peers"])
    refused(benchmark("rounds", "--rounds", 0), names=["--rounds 0"])


def test_the_environment_of_others_is_prepared_or_is_not(monkeypatch: pytest.MonkeyPatch):
    prepare_process()
    monkeypatch.setenv("MINE", "1")
    plain, tuned = rounds.environment(prepared=False), rounds.environment(prepared=True)
    assert plain["MINE"] == tuned["MINE"] == "1"
    assert "MKL_CBWR" in variables() and "MKL_CBWR" not in plain and "MALLOC_TOP_PAD_" not in plain
    assert tuned["MKL_CBWR"] == "AVX2,STRICT" and tuned["MALLOC_TOP_PAD_"] == str(64 << 20)
