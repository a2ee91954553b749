"""What needs no Ray: a failed start is tried twice, and news of calls that have come back reaches the driver."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import driver, session
from actors.coordinator import Progress
from actors.errors import ClusterError
from actors.ray_executor import PendingCalls
from actors.ray_internals import PLAIN
from rayfl.experiment.runtime import Runtime
from rayfl.rounds.executor import Job, JobResult, Wave
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.worker_jobs import EvaluateJob, PooledJob
from rayfl.run_directory.play_run import Listener
from tests.refusals import check_sentence, mentions, refused


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with Ray, in order; nothing is started."""
    done: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(session, "require_room_here", lambda runtime: None)
    # Nothing of a Ray that was started is looked at, and no fork server begins.
    monkeypatch.setenv(PLAIN, "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return done


def failing(tries: list[str], times: int) -> Any:
    """Stands for `ray.init`, which fails `times` times."""

    def init(**arguments: Any) -> None:
        tries.append("init")
        if tries.count("init") <= times:
            raise Exception("The current node timed out during startup.\nThis could happen because ...")

    return init


def test_a_failed_start_is_tried_once_more(tries: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "init", failing(tries, 1))
    with session.session(Runtime()):
        assert tries == ["init", "shutdown", "init"]


@pytest.mark.parametrize("given", [{"address": "local"}, {}])
def test_local_is_this_machine(given: dict[str, str], tries: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379" if given else "local")
    monkeypatch.setattr(ray, "init", failing(tries, 0))
    with session.session(Runtime.model_validate(given)):
        assert tries == ["init"]


def test_a_dashboard_is_no_cluster_to_join(tries: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    command = "ray job submit --address http://127.0.0.1:8265 --working-dir . -- python -m rayfl run FILE"
    with refused(names=["address='http://127.0.0.1:8265'", command, "RAY_ADDRESS"]), session.session(Runtime()):
        pass
    assert not tries


def test_a_second_failure_is_one_sentence_that_says_how_to_go_on(tries: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "init", failing(tries, 2))
    facts = ["/dev/shm", "RAY_TMPDIR", f"{PLAIN}=1", "rayfl resume runs/a", "timed out during startup"]
    with refused(names=facts, error=ClusterError), session.session(Runtime(), resume="rayfl resume runs/a"):
        pass
    assert tries[:3] == ["init", "shutdown", "init"]


def test_what_is_opened_first_is_said(tries: list[str], monkeypatch: pytest.MonkeyPatch):
    assert mentions(session.opening(Runtime()), "Ray")
    check_sentence(session.opening(Runtime(address="head:6379")), ["Ray", "head:6379"])
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert mentions(session.opening(Runtime()), "actors")


def test_the_clients_of_the_calls_that_have_come_back_are_done():
    jobs = [Job(EvaluateJob((0, 1, 2))), Job(EvaluateJob((3,))), Job(EvaluateJob((4, 5)))]
    pending = PendingCalls(None, jobs)
    assert pending.wave == Wave("evaluate", 0, 6)
    pending.done |= {2: JobResult(None, []), 0: JobResult(None, [])}
    assert pending.wave == Wave("evaluate", 5, 6)
    assert PendingCalls(None, [Job(PooledJob(0, 9))]).wave == Wave("pooled", 0, 0)


def test_how_far_the_round_is_reaches_the_driver_with_the_rounds(monkeypatch: pytest.MonkeyPatch):
    row, wave = RoundRow(0, 8, 8, 0, 0, 0.0, 1.0), Wave("train", 3, 8)
    news = [
        Progress([], False),
        Progress([], False, wave),
        Progress([(row, {"own/accuracy": 0.5})], False),
        Progress([], True),
    ]
    # What stands for a reference is the value itself.
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(ray, "get", lambda value: value)
    seen: list[object] = []
    following = driver._Following(Listener(lambda *one: seen.append(one), seen.append))
    following.coordinator = SimpleNamespace(progress=SimpleNamespace(remote=lambda *_: news.pop(0)))
    over: Any = object()
    following.follow(over)
    assert seen == [wave, (row, {"own/accuracy": 0.5})] and not news and following.reached == 0
