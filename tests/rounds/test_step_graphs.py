"""Captured steps: their carries are updated in place, their numbers come from buffers, and what cannot be captured runs
as it is and says why. The graphs are played on a CPU (benchmarks/played_graphs.py)."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.played_graphs import CpuRecorder
from jobs.dry_run import forecast
from rayfl.determinism.global_draws import watched
from rayfl.experiment.experiment import Experiment
from rayfl.methods.base import Carry, Stage
from rayfl.rounds import step_graphs
from rayfl.rounds.step_graphs import CudaRecorder, Numbers, Step, StepGraphs
from tests.pretended_gpu import PretendedGpu
from tests.refusals import refused

CPU = torch.device("cpu")
STAGE = Stage(lr=0.5)


@pytest.fixture
def graphs() -> StepGraphs:
    return StepGraphs(CpuRecorder(), CPU, steps_before=1)


def numbers(*values: float) -> list[Numbers]:
    return [(torch.tensor([value, 1.0]), None) for value in values]


def run(graphs: StepGraphs, step: Step, carry: Carry, given: Sequence[Numbers], stage: Stage = STAGE) -> Carry:
    """The carry after the steps, with the graphs, which must be that without them."""
    wanted = carry
    for each in given:
        wanted = step(wanted, each)
    found = watched(lambda: graphs.run(stage, 0, step, carry, given) if graphs.takes(stage, True) else wanted)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) and found[name].stride() == tensor.stride()
    return found


def pair() -> Carry:
    return {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 5.0]), "sum": torch.zeros(2)}


def exchanging(carry: Carry, given: Numbers) -> Carry:
    """Each tensor becomes the other one, which lies in a buffer that is overwritten, too."""
    assert given[0] is not None
    return {"a": carry["b"], "b": carry["a"], "sum": carry["sum"] + carry["a"] * given[0]}


def test_a_carry_whose_tensors_change_places_is_not_overwritten_before_it_is_read(graphs: StepGraphs):
    run(graphs, exchanging, pair(), numbers(1, 2, 3, 4, 5))
    assert graphs.num_replays == 4


def test_a_carry_that_was_given_back_is_never_overwritten(graphs: StepGraphs):
    def adding(carry: Carry, given: Numbers) -> Carry:
        assert given[0] is not None
        return {**carry, "a": carry["a"] + given[0]}

    run(graphs, adding, pair(), numbers(1))
    begun = pair()
    first = run(graphs, adding, begun, numbers(1, 2))
    kept = first["a"].clone()
    run(graphs, adding, {name: -tensor for name, tensor in pair().items()}, numbers(7, 8, 9))
    assert torch.equal(first["a"], kept)
    # What no step changes is not copied.
    assert first["b"] is begun["b"] and graphs.num_replays == 5


def test_steps_of_other_shapes_take_turns_on_one_carry(graphs: StepGraphs):
    def summing(carry: Carry, given: Numbers) -> Carry:
        assert given[0] is not None
        name = "a" if len(given[0]) == 4 else "b"
        return {**carry, name: carry[name] * 0.5 + given[0].sum()}

    long, short = torch.arange(4.0), torch.arange(3.0)
    given: list[Numbers] = [(long,), (short,), (long + 1,), (short + 1,), (long + 2,), (long + 3,), (short + 2,)]
    run(graphs, summing, pair(), given)
    assert graphs.num_replays == 5


def test_a_step_that_changes_strides_is_captured_before_and_after_it_does(graphs: StepGraphs):
    def turning(carry: Carry, given: Numbers) -> Carry:
        assert given[0] is not None
        return {"a": (carry["a"].t() * 0.5 + given[0].sum()).contiguous().t(), "b": carry["b"]}

    begun = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    run(graphs, turning, begun, numbers(1, 2, 3))
    assert run(graphs, turning, begun, numbers(4, 5, 6))["b"] is begun["b"]
    assert graphs.num_replays == 1 + 3


def test_a_number_of_the_stage_is_not_that_of_another_round(graphs: StepGraphs):
    for lr in (0.5, 0.25, 0.5):
        stage = replace(STAGE, lr=lr)
        run(graphs, descending(stage), pair_of_one(), numbers(1, 2, 3), stage)
    assert graphs.num_replays == 2 + 2 + 3


def pair_of_one() -> Carry:
    return {"a": torch.tensor([1.0, 2.0])}


def descending(stage: Stage) -> Step:
    def step(carry: Carry, given: Numbers) -> Carry:
        assert given[0] is not None
        return {"a": carry["a"] - stage.lr * given[0]}

    return step


def test_a_tensor_with_repeated_entries_keeps_them(graphs: StepGraphs):
    def halving(carry: Carry, given: Numbers) -> Carry:
        return {"a": carry["a"] * 0.5 + carry["rate"], "rate": carry["rate"]}

    run(graphs, halving, {"a": torch.ones(3), "rate": torch.tensor(0.1).expand(3)}, numbers(1, 2, 3))
    assert graphs.num_replays == 2


def test_only_the_graphs_that_were_used_last_are_kept(graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2)
    for lr in (0.1, 0.2, 0.3, 0.1):
        stage = replace(STAGE, lr=lr)
        run(graphs, descending(stage), pair_of_one(), numbers(1, 2), stage)
    assert graphs.num_replays == 4


def test_a_step_runs_a_few_times_before_it_is_captured():
    recorder = CpuRecorder()
    graphs = StepGraphs(recorder, CPU)
    run(graphs, exchanging, pair(), numbers(*range(step_graphs.STEPS_BEFORE - 1)))
    assert recorder.captured == 0
    run(graphs, exchanging, pair(), numbers(1, 2))
    assert (recorder.captured, graphs.num_replays) == (1, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x * x.sum().item(), ["_local_scalar_dense"]),
        (lambda x: x * len(x[x > 0]), ["index"]),
        (lambda x: x + 0 * random.random(), ["random"]),
        (lambda x: x + 0 * torch.rand(2), ["random", "rand"]),
    ],
)
def test_a_step_that_cannot_be_captured_runs_as_it_is_and_says_why(
    graphs: StepGraphs, change: Callable[[Tensor], Tensor], words: list[str], caplog: pytest.LogCaptureFixture
):
    def step(carry: Carry, given: Numbers) -> Carry:
        return {"a": change(carry["a"])}

    step_graphs.log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "rayfl"):
        try:
            for _ in range(2):
                run(graphs, step, pair_of_one(), numbers(1, 2, 3))
        # The job is done again with keys.
        except Exception as error:  # noqa: BLE001
            assert type(error).__name__ == "UnkeyedDraw"
    assert graphs.num_replays == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(word in line for word in ["runtime.graphs", STAGE.name, *words])


@pytest.mark.parametrize(("is_resident", "words"), [(False, "do not fit"), (True, "random")])
def test_data_that_do_not_fit_and_work_that_draws_are_refused(graphs: StepGraphs, is_resident: bool, words: str):
    # Work that draws is done with keys, and not watched.
    assert not graphs.takes(STAGE, is_resident)
    assert words in graphs.reasons[STAGE.name]


def test_a_capture_that_fails_leaves_a_run_without_graphs():
    class Failing:
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation failed due to a previous error during capture")

    graphs = StepGraphs(Failing(), CPU, steps_before=1)
    run(graphs, exchanging, pair(), numbers(1, 2, 3))
    assert "previous error" in graphs.reasons[STAGE.name] and graphs.num_replays == 0
    assert not watched(lambda: graphs.takes(replace(STAGE, name="another"), True))


def test_a_method_that_replaces_what_it_reads_keeps_the_memory_of_the_capture(graphs: StepGraphs):
    constants = [torch.tensor([0.5, 0.25])]

    def step(carry: Carry, given: Numbers) -> Carry:
        return {"a": carry["a"] + constants[0]}

    place = constants[0].untyped_storage().data_ptr()
    run(graphs, step, pair_of_one(), numbers(1, 2))
    (graph,) = graphs._graphs.values()
    assert place in graph.kept


def test_numbers_and_memory_are_frozen_by_the_recorder_of_these_tests():
    factor, x, y = [2.0], torch.tensor([1.0, 2.0]), torch.zeros(2)

    def work() -> None:
        y.copy_(x * factor[0])

    replay = CpuRecorder().record(work)
    assert y.tolist() == [0, 0]
    factor[0] = 100.0
    x.copy_(torch.tensor([3.0, 4.0]))
    replay()
    assert y.tolist() == [6, 8]
    with pytest.raises(RuntimeError, match="capturing"):
        CpuRecorder().record(lambda: y.copy_(x * x.sum().item()))  # type: ignore[arg-type, return-value]


def test_a_graph_is_captured_in_the_common_pool_and_replayed():
    with PretendedGpu() as gpu:
        streams = gpu.driver.streams
        replay = CudaRecorder().record(lambda: streams.calls.append(f"work on {torch.cuda.current_stream()}"))
        replay()
    assert streams.calls == ["begin in pool 7", "work on side", "end", "replay"]


def test_a_capture_that_fails_leaves_the_stream_as_it_was():
    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    # torch leaves its own stream in place where the end of a capture fails.
    with PretendedGpu():
        with pytest.raises(RuntimeError, match="not permitted"):
            CudaRecorder().record(fails)
        assert torch.cuda.current_stream() == "0"


@pytest.mark.parametrize("runtime", [{}, {"executor": "inline"}, {"device": "cpu", "num_gpus": 0.5}])
def test_graphs_without_a_gpu_are_refused(runtime: dict[str, Any]):
    tables: dict[str, Any] = {"rounds": 1, "data": "digits", "partition": "iid", "model": "mlp", "method": "fedavg"}
    tables["clients"] = {"count": 2}
    with refused(names=["runtime.graphs", "auto", "cpu", "num_gpus"]):
        Experiment(**tables, runtime={**runtime, "graphs": "auto"})
    assert Experiment(**tables, runtime={**runtime, "graphs": False}).runtime.graphs is False


def test_a_dry_run_of_graphs_needs_no_gpu():
    tables: dict[str, Any] = {"rounds": 1, "data": "digits", "partition": "iid", "model": "mlp", "method": "fedavg"}
    runtime = {"num_gpus": 1, "graphs": "auto"}
    assert forecast(Experiment(**tables, clients={"count": 2}, runtime=runtime)).device_name == "cpu"
