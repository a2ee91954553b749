"""What a run used of its machines: by hand, with a pretended NVML, and over resumed runs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.resources import Meter, Use, totals
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.description import read_resources
from rayfl.run_directory.play_run import Listener, RunOutput, Stopped, play_run
from tests.actors.toys import experiment, play_on_ray, write_experiment


def test_totals_add_times_and_keep_peaks():
    # Two actors on GPU a, which both see its counter, and one on b; an earlier play took an hour of everything.
    uses = [
        Use(1800, 900, 5, 7, {"a": 3.6e6}),
        Use(1800, 900, 9, 2, {"a": 3.5e6}),
        Use(3600, 1800, 1, 1, {"b": 7.2e6}),
    ]
    before = {"cpu_hours": 1.0, "gpu_hours": 1.0, "gpu_kilowatt_hours": 1.0, "peak_bytes": 8.0, "gpu_peak_bytes": 8.0}
    assert totals(uses, before) == {
        "cpu_hours": 3.0,
        "gpu_hours": 2.0,
        "gpu_kilowatt_hours": 4.0,
        "peak_bytes": 9.0,
        "gpu_peak_bytes": 8.0,
    }
    assert "gpu_kilowatt_hours" not in totals([Use(1, 0, 1, 0, {})], {})


def test_energy_is_read_where_nvml_is_there(monkeypatch: pytest.MonkeyPatch):
    counter = iter([1000.0, 61000.0])
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(counter),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="one"))
    use = Meter(torch.device("cuda"), 0.5).read()
    assert use.energy_j == {"one": 60.0} and use.gpu_s > 0
    assert Meter(torch.device("cpu")).read().energy_j == {}


def test_a_resumed_run_adds_what_it_uses(tmp_path: Path):
    setup = prepare(experiment(rounds=4))
    directory = write_experiment(tmp_path)
    used: list[dict[str, float]] = []
    for resumed in (False, True):
        output = RunOutput(directory, checkpoints=Checkpoints(every=1), resumed=resumed)
        try:
            play_run(setup, InlineExecutor(setup), output, Listener(stopping=lambda resumed=resumed: not resumed))
        except Stopped:
            assert not resumed
        used.append(read_resources(directory))
    assert 0 < used[0]["cpu_hours"] < used[1]["cpu_hours"] and used[0]["peak_bytes"] <= used[1]["peak_bytes"]
    assert used[1]["gpu_hours"] == 0 and "gpu_kilowatt_hours" not in used[1]


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_actors_report_what_they_used(tmp_path: Path):
    chosen = experiment(runtime={"actors": 2})
    assert play_on_ray(chosen, prepare(chosen), write_experiment(tmp_path), Listener())
    assert read_resources(tmp_path)["cpu_hours"] > 0
