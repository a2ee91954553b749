"""What every method must hold where clients are trained on a GPU: hooks, uplinks and sums work there, to the bits of
main memory. The GPU is a pretended one, without autograd, so that gradients are made up."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.data.batches import Batch
from rayfl.data.transfer import PAGE
from rayfl.errors import MethodError
from rayfl.methods.base import Capabilities, Carry, Context, Finished, Method, ServerHalf
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.server.scaffold import Scaffold
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.models.flops import Uses
from rayfl.rounds import client_round
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.task import BoundTask, Objective
from rayfl.testing.executors import assert_same_bits, contents, play, rows
from rayfl.tree import State, Tree
from tests.contracts.every_method import (
    FEW_EXAMPLES,
    FREE_CASES,
    REGISTERED,
    SEAMS,
    VARIED,
    Case,
    cases,
    every_method,
    variant,
    with_two_unseen,
)
from tests.contracts.seams import quadratic
from tests.contracts.single_rounding import Rounding
from tests.pretended_gpu import PretendedGpu
from tests.refusals import refused


class MadeUp(BoundTask):
    """A task whose gradients are entrywise formulas of the parameters and the labels."""

    def __init__(self, task: BoundTask) -> None:
        self.task, self.vmappable = task, task.vmappable

    def init(self, seed: int) -> Tree:
        return self.task.init(seed)

    @property
    def weight_uses(self) -> Uses:
        return self.task.weight_uses

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        return self.losses(params, batch)[0].mean()

    def losses(self, params: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        # A model that is evaluated may hold labels, too.
        sizes = torch.stack([tensor.abs().float().mean() for tensor in params.values()])
        losses = batch.labels * 0.1 + sizes.mean()
        return losses, torch.ones_like(losses)

    def loss_and_features(self, params: Tree, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        weight = params[f"{self.head}.weight"]
        return self.loss(params, batch), batch.inputs.flatten(1)[:, : weight.shape[1]] * weight[0]

    def score(self, params: Tree, batch: Batch) -> Tensor:
        return (batch.labels % 2 == 0).float()

    def value_and_grad(self, params: Tree, batch: Batch, objective: Objective | None = None) -> tuple[Tensor, Tree]:
        shift = batch.labels.float().mean() * 0.01 + batch.inputs.mean() * 0.1
        return self.loss(params, batch), {
            name: (tensor * 0.3 - tensor**3 + shift).clamp(-1, 1) for name, tensor in params.items()
        }

    def hvp(self, params: Tree, batch: Batch, vector: Tree) -> Tree:
        return {name: vector[name] * (0.3 + tensor * tensor) for name, tensor in params.items()}


class Seen:
    """Where the tensors lay that hooks were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
        self.devices: dict[str, set[str]] = {}
        kind = type(setup.method)
        for hook in ("begin", "end_stage", "finish"):
            if getattr(kind, hook) is not getattr(Method, hook):
                monkeypatch.setattr(kind, hook, self.watched(hook, getattr(kind, hook)))
        encode = client_round.encode_upload

        def encoded(upload: Mapping[str, object], memory: State, ctx: Context) -> object:
            self.see("encode", [getattr(part, "a", part) for part in upload.values()])
            return encode(upload, memory, ctx)  # type: ignore[arg-type]

        monkeypatch.setattr(client_round, "encode_upload", encoded)

    # Any hook's arguments.
    def watched(self, name: str, hook):
        def watching(method, *args, **kwargs):
            self.see(name, [arg for arg in args if isinstance(arg, dict)])
            self.see(name, [arg.initial for arg in args if isinstance(arg, Context)])
            return hook(method, *args, **kwargs)

        return watching

    def see(self, name: str, found: object) -> None:
        # A single number may lie anywhere.
        found = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.dim()]
        self.devices.setdefault(name, set()).update(leaf.device.type for leaf in found)


def made_up(setup: Setup, **changed: object) -> Setup:
    return replace(setup, method=setup.method.with_task(MadeUp(setup.method.task)), **changed)  # type: ignore[arg-type]


# Any: what a run leaves.
def played(setup: Setup):
    records, run_states = play(setup)
    return rows(records), contents(InlineExecutor(setup), run_states[-1])


def assert_same_there(make, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[Seen, PretendedGpu]:
    """A run on the pretended GPU gives the records and the bits of one in main memory."""
    wanted, bits = played(made_up(make(**options)))
    there = made_up(make(**options), device_name="cuda:0")
    with monkeypatch.context() as patched, PretendedGpu() as gpu:
        seen = Seen(patched, there)
        found, found_bits = played(there)
    assert found == wanted
    assert_same_bits(found_bits, bits)
    return seen, gpu


@every_method
def test_hooks_uplinks_and_sums_on_a_gpu_give_the_bits_of_main_memory(case: Case, monkeypatch: pytest.MonkeyPatch):
    assert case.kind.capabilities.on_device
    top_k = TopK(keep_ratio=0.3)
    uplink = top_k if "uplink" in case.kind.capabilities.own_feedback else ErrorFeedback(inner=top_k)
    options = {"uplink": uplink} if case in FREE_CASES else {}
    seen, _ = assert_same_there(case.make, monkeypatch, **options)
    for hook in ("begin", "end_stage", "finish", "encode"):
        assert seen.devices.get(hook, set()) <= {"cuda"}, hook
    assert seen.devices["finish"] == {"cuda"}


@cases([case for case in REGISTERED if case.kind.capabilities.newcomer == "round"])
def test_an_unseen_clients_first_round_on_a_gpu_gives_the_bits_of_main_memory(
    case: Case, monkeypatch: pytest.MonkeyPatch
):
    assert_same_there(with_two_unseen(case), monkeypatch, rounds=2, clients={"unseen": 0.3}, splits=FEW_EXAMPLES)


@cases([*SEAMS, *VARIED])
def test_dense_uplinks_on_a_gpu_give_the_bits_of_main_memory(case: Case, monkeypatch: pytest.MonkeyPatch):
    assert_same_there(case.make, monkeypatch)


@cases([*SEAMS, *VARIED])
def test_stacks_on_a_gpu_give_the_bits_of_main_memory(case: Case, monkeypatch: pytest.MonkeyPatch):
    assert_same_there(case.make, monkeypatch, engine="vmap", stack_width=2, rounds=2)


def fedavg(**options: object) -> Setup:
    return quadratic.setup(FedAvg, hyper={"batch_size": 2}, rounds=3, **options)  # type: ignore[arg-type]


def scaffold(**options: object) -> Setup:
    return quadratic.setup(Scaffold, hyper={"batch_size": 2}, rounds=3, **options)  # type: ignore[arg-type]


SERVERS = [case.name for case in REGISTERED if case.kind.capabilities.server_on_device]

TREE = 2 * PAGE
"""Bytes of a buffer of the quadratics' two tensors."""


@pytest.mark.parametrize(
    ("make", "up", "down"),
    [
        # The model in each of three rounds; a sum in each.
        (fedavg, {TREE: 3}, {TREE: 3}),
        # Model and control variate, and the states of four clients; these again, and the sums of both messages at once.
        (scaffold, {TREE: 2 * 3 + 4 * 3}, {TREE: 4 * 3, 2 * TREE: 3}),
    ],
)
def test_messages_go_up_and_sums_come_down_once_a_call(
    make, up: dict[int, int], down: dict[int, int], monkeypatch: pytest.MonkeyPatch
):
    """However many clients a call has: here all four."""
    monkeypatch.setattr("rayfl.rounds.participants.cut", lambda count, *rest: [(0, count)])
    _, gpu = assert_same_there(make, monkeypatch)
    # Beside single numbers.
    assert {size: gpu.downloads.count(size) for size in gpu.downloads if size >= PAGE} == down
    # And the initial parameters once.
    assert {size: gpu.uploads.count(size) for size in up} == {size: number + 1 for size, number in up.items()}


class Beside(FedAvg):
    """A method from elsewhere, whose hooks make tensors in main memory and ask numpy."""

    def begin(self, state: State, received: Mapping[str, object], ctx: Context) -> Carry:
        carry = super().begin(state, received, ctx)  # type: ignore[arg-type]
        return {**carry, "start": {name: tensor + torch.ones(tensor.shape) for name, tensor in carry["params"].items()}}

    def end_stage(self, carry: Carry, *, stage: object) -> Carry:
        return {**carry, "start": {name: torch.from_numpy(one.numpy() * 2) for name, one in carry["start"].items()}}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        moved = {name: tensor + 0.1 * torch.ones(tensor.shape) for name, tensor in carry["params"].items()}
        return super().finish(state, cast(LocalCarry, {**carry, "params": moved}), ctx)


class Claims(Beside):
    """The same, which says that it takes tensors of a GPU."""

    capabilities = Capabilities(on_device=True)


class Further(Claims):
    """A subclass of one that says so, and does not say so itself."""


class Halves(Compressor):
    """A compressor from elsewhere, which hands its tensors to numpy."""

    name: ClassVar[str] = "halves"

    def encode(self, x: Tree, memory: Tree, generator: object):
        halves = {name: torch.from_numpy(tensor.numpy() * 0.5) for name, tensor in x.items()}
        return Dense().encode(halves, memory, generator)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("kind", [Beside, Further])
def test_hooks_of_a_method_from_elsewhere_see_main_memory(kind, engine: str, monkeypatch: pytest.MonkeyPatch):
    assert not kind.capabilities.on_device
    seen, _ = assert_same_there(
        lambda **options: quadratic.setup(kind, rounds=2, **options), monkeypatch, engine=engine
    )
    assert seen.devices == {hook: {"cpu"} for hook in ("begin", "end_stage", "finish", "encode")}


def test_a_compressor_from_elsewhere_sees_main_memory(monkeypatch: pytest.MonkeyPatch):
    for uplink in (Halves(), ErrorFeedback(inner=Halves())):
        assert not uplink.takes_device
        seen, _ = assert_same_there(fedavg, monkeypatch, uplink=uplink)
        assert seen.devices["finish"] == seen.devices["encode"] == {"cpu"}
    assert TopK().takes_device and ErrorFeedback().takes_device


def test_a_method_that_only_says_that_it_takes_tensors_of_a_gpu_is_named():
    there = made_up(quadratic.setup(Claims), device_name="cuda:0")
    with (
        PretendedGpu(),
        refused(names=["Claims.begin", "same device"], error=MethodError),
    ):
        play(there)


@pytest.mark.parametrize(("name", "engine"), [*((name, "loop") for name in SERVERS), ("fedavg", "vmap")])
def test_a_server_on_the_gpu_gives_the_bits_of_main_memory_and_copies_no_model(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
):
    """With operations that round once whatever computes them: the pretended GPU cannot show that others do not."""
    case = variant(name, name, {"batch_size": 2, "steps": 2})
    rounding = Rounding()
    kind = case.kind
    assert issubclass(kind, ServerHalf)
    update = kind.server_update
    options = {"engine": engine, "rounds": 3}
    wanted, bits = played(made_up(case.make(**options)))
    there = made_up(case.make(**options), device_name="cuda:0", server_on_device=True)
    check_setup(there)

    # Any: a hook's arguments.
    def watched(*arguments: Any) -> Any:
        with rounding:
            return update(*arguments)

    monkeypatch.setattr(case.kind, "server_update", watched)
    with PretendedGpu() as gpu:
        records, run_states = play(there)
        before_last = len(gpu.downloads)
        on_gpu = [tensor.device.type for state in run_states for tensor in tree_leaves(state.server)]
        found = contents(InlineExecutor(there), run_states[-1])
    assert rows(records) == wanted
    assert_same_bits(found, bits)
    assert set(on_gpu) == {"cuda"} and rounding.count and not rounding.refused
    # The initial parameters, round 0's message and the server's first state. States of clients move as without this.
    if not there.stateful:
        assert gpu.uploads.count(TREE) == 3 and TREE not in gpu.downloads[:before_last]


@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (scaffold, {}, ["Scaffold", "main memory"]),
        (fedavg, {"uplink": Halves()}, ["halves", "uplink"]),
        (fedavg, {"downlink": TopK()}, ["downlink"]),
    ],
)
def test_a_server_that_cannot_stay_on_the_gpu_is_refused(make, options: dict[str, object], names: list[str]):
    with refused(names=["runtime.server_on_device", *names]):
        check_setup(made_up(make(**options), device_name="cuda:0", server_on_device=True))
