"""What platform.json says of the machines that compute."""

import pytest

from rayfl.determinism import platform
from tests.refusals import check_sentence


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
