"""What a method of somebody's own gives back or raises is told in one sentence, with its hook and its place."""

import pickle
from typing import Any

import pytest
import torch

from rayfl import tree
from rayfl.compress.scalar import count_packet
from rayfl.errors import HookError, MethodError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Finished, Reply
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.refusals import check_sentence, refused


def setup(method: type, **tables: Any) -> Setup:
    given: dict[str, Any] = {
        "rounds": 2,
        "data": {"name": "synthetic", "samples_per_group": 20, "num_groups": 4, "num_classes": 3, "dim": 5},
        "partition": "iid",
        "clients": {"count": 3},
        "model": "logistic",
        "method": method(lr=0.1),
    }
    return prepare(Experiment(**given | tables))


def given_back(hook: str, answer: Any, kind: type = FedAvg) -> type:
    """A method one of whose hooks gives something back, whatever it is asked."""

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return answer

    replaced.__name__ = hook
    return type("Mine", (kind,), {"__module__": __name__, hook: replaced})


LINE = given_back.__code__.co_firstlineno + 3


@pytest.mark.parametrize(
    ("hook", "answer", "names"),
    [
        ("plan", None, ["nothing", "Plan"]),
        ("init_server", None, ["nothing", "a state"]),
        ("init_client", {"count": 3}, ["type int", "'count'", "a state"]),
        ("init_client", {"a": {"b": [1.0]}}, ["type list", "'a.b'", "a state"]),
        ("init_server_memory", 3, ["type int", "a state"]),
        ("download", None, ["nothing", "trees or packets by name"]),
        ("download", {"model": 3}, ["type int", "'model'", "packets"]),
        ("personal_message", {}, ["type dict", "Reply"]),
        ("personal_message", Reply({}, {"n": 1}), ["type int", "'n'", "a state"]),
        ("begin", None, ["nothing", "carry"]),
        ("step", torch.zeros(()), ["type Tensor", "carry"]),
        ("end_stage", None, ["nothing", "carry"]),
        ("finish", {}, ["type dict", "Finished"]),
        ("finish", Finished({}, None, weight="1"),  # pyright: ignore[reportArgumentType]
         ["type str", "a number"]),
        ("finish", Finished({}, None, metrics={"m": {}}),  # pyright: ignore[reportArgumentType]
         ["type dict", "'m'", "numbers"]),
        ("finish", Finished({}, [1]),  # pyright: ignore[reportArgumentType]
         ["type list", "a message", "packets by name"]),
        ("finish", Finished({}, {"delta": 3}),  # pyright: ignore[reportArgumentType]
         ["type int", "'delta'", "packets", "trees"]),
        ("finish", Finished({}, {"delt": {}}), ["'delt'", "'delta'", "Mine.gather"]),
        ("store_uplink", None, ["nothing", "a state"]),
        ("server_update", None, ["nothing", "server state", "metrics"]),
        ("server_update", ({}, {}, {}), ["server state", "metrics", "3 values"]),
        ("server_update", ({}, 3), ["type int", "numbers by name"]),
        ("model", None, ["nothing", "a model"]),
        ("reply", None, ["nothing", "Reply"]),
        ("receive_reply", None, ["nothing", "a state"]),
        ("eval_begin", {}, ["params", "model to evaluate"]),
        ("outputs", None, ["nothing", "outputs of a batch"]),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_told_with_its_hook_and_line(hook: str, answer: Any, names: list[str]):
    kind = given_back(hook, answer)
    if hook == "receive_reply":
        kind = type("Mine", (kind,), {"__module__": __name__, "reply": lambda self, *a: Reply({}, {})})
    if hook == "eval_begin":
        kind.capabilities = kind.capabilities.but(personalized=True)
    with pytest.raises((MethodError, HookError)) as caught:
        play(setup(kind))
    text = str(caught.value)
    check_sentence(text, [f"Mine.{hook}", f"test_check_hooks.py, line {LINE}", *names])
    assert text.startswith("round 0") == isinstance(caught.value, MethodError)


def test_peers_are_told_too():
    ring = {"topology": "ring"}
    with refused(names=["round 0", "client 0", "Mine.mix"], error=MethodError):
        play(setup(given_back("mix", None, DPSGD), **ring))
    with refused(names=["round 0", "client 0", "Mine.finish", "modle", "Mine.gather"], error=MethodError):
        play(setup(given_back("finish", Finished({}, {"modle": {}}), DPSGD), **ring))


class Late(FedAvg):
    """Fails in round 1, on a line of a function that its hook calls."""

    hook, error = "", ValueError("one\ntwo")

    def fail(self, hook: str, round: int) -> None:
        if (hook, round) == (self.hook, 1):
            raise self.error

    def server_update(self, server: Any, received: Any, delivered: Any, ctx: Any) -> Any:
        self.fail("server_update", ctx.round)
        return super().server_update(server, received, delivered, ctx)

    def finish(self, state: Any, carry: Any, ctx: Any) -> Any:
        self.fail("finish", ctx.round)
        return super().finish(state, carry, ctx)


class Deep(Late):
    """Fails inside rayfl, which a line of its own called."""

    def step(self, carry: Any, batch: Any, *, stage: Any) -> Any:
        return {"params": tree.add(carry["params"], {})}


RAISED = Late.fail.__code__.co_firstlineno + 2


@pytest.mark.parametrize(("hook", "of"), [("server_update", ""), ("finish", ", client 0")])
def test_what_a_hook_raises_is_an_error_of_the_method(hook: str, of: str):
    records = []
    with pytest.raises(MethodError) as caught:
        records += play(setup(type("Mine", (Late,), {"__module__": __name__, "hook": hook})))
    words = str(caught.value)
    check_sentence(words, [f"round 1{of}", f"Mine.{hook}", f"test_check_hooks.py, line {RAISED}", "ValueError: one"])
    assert ("client" in words) == ("client" in of) and not records
    assert str(pickle.loads(pickle.dumps(caught.value))) == words  # noqa: S301 (our own)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_line_is_one_of_the_methods_own(engine: str):
    line = Deep.step.__code__.co_firstlineno + 1
    with refused(
        names=["round 0", "client 0", "Deep.step", "test_check_hooks.py", f"line {line}", "KeyError", "1.weight"],
        error=MethodError,
    ):
        play(setup(Deep, runtime={"engine": engine}))


class Executors(RuntimeError):
    """What an executor raises."""

    __module__ = "ray.exceptions"


@pytest.mark.parametrize("error", [MemoryError("boom"), Executors("lost")])
def test_what_is_no_fault_of_the_method_stays_what_it_is(error: Exception):
    kind = type("Mine", (Late,), {"__module__": __name__, "hook": "server_update", "error": error})
    with pytest.raises(type(error)) as caught:
        play(setup(kind))
    assert str(caught.value) == str(error)


class Counting(FedAvg):
    """Sends a packet that nobody adds up, and which is billed."""

    def finish(self, state: Any, carry: Any, ctx: Any) -> Finished:
        done = super().finish(state, carry, ctx)
        assert done.message is not None
        return Finished(state, {**done.message, "seen": count_packet("seen", 3)})


class Keeping(FedAvg):
    """Sends a tree that the server keeps of its client, and does not add up."""

    def finish(self, state: Any, carry: Any, ctx: Any) -> Finished:
        return Finished(state, {"delta": self.progress(carry), "kept": carry["params"]})

    def init_server_memory(self, client: Any, params: Any) -> Any:
        return {"kept": params}

    def store_uplink(self, server_memory: Any, message: Any, ctx: Any) -> Any:
        return {"kept": message["kept"].decode()}


@pytest.mark.parametrize("kind", [Counting, Keeping])
def test_what_is_right_is_let_through(kind: type):
    records, _ = play(setup(kind))
    plain, _ = play(setup(FedAvg))
    assert all(one.row.uplink_bits > other.row.uplink_bits for one, other in zip(records, plain, strict=True))


class Aliased(FedAvg):
    """A hook that is another function, and one that needs no self."""

    def _same(self, carry: Any, *, stage: Any) -> Any:
        return carry

    end_stage = _same

    @staticmethod
    def init_client(client: Any, params: Any, draws: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {}


def test_hooks_by_other_names_are_called_too():
    records, _ = play(setup(Aliased))
    assert len(records) == 2
