"""What platform.json says of the machines that compute."""

import pytest

from rayfl.determinism import platform, torch_flags
from rayfl.determinism.process import prepare_process
from tests.refusals import check_sentence, refused


def test_variables_of_the_user_that_may_change_bits_are_recorded_and_compared(monkeypatch: pytest.MonkeyPatch):
    here = platform.describe(1)
    assert platform.differences(here, platform.describe(1)) == []
    monkeypatch.setenv("TORCH_MKLDNN_MATMUL_MIN_DIM", "8")
    there = platform.describe(1)
    (difference,) = platform.differences(here, there)
    check_sentence(difference, ["TORCH_MKLDNN_MATMUL_MIN_DIM=None", "TORCH_MKLDNN_MATMUL_MIN_DIM=8"])


def test_a_process_on_the_processor_asks_no_gpu(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a GPU was asked")

    for name in ("is_available", "get_device_name", "init", "device_count"):
        monkeypatch.setattr(f"torch.cuda.{name}", refuse)
    assert platform.describe(1)["gpu"] is None
    with pytest.raises(AssertionError):
        platform.describe(1, "cuda")


def test_the_process_that_prepared_a_run_is_recorded_where_it_is_another_kind():
    here = platform.describe(2)
    driver = {**here, "cpu": "another", "cores": 64, "threads_per_actor": 1}
    recorded = platform.with_driver(here, driver)
    assert recorded == {**here, "driver": {"cpu": "another"}}
    assert platform.differences(platform.of_driver(recorded), driver, platform.ON_CPU) == []
    assert platform.with_driver(recorded, here) == here


def test_an_instruction_set_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_flags, "_chosen", [])
    torch_flags.choose("native")
    before = platform.variables()
    with refused(names=["instruction_set='avx2'", "process", "computed"]):
        torch_flags.choose("avx2")
    assert platform.variables() == before
    torch_flags.choose("native")
    prepare_process()
