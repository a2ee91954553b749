"""Checks what the hooks of a method return, and names the hook and the line if one fails.

An error says in one sentence which hook of which class returned the wrong type, and which type it must return.
`HookInputs` finds hooks that write to what several clients read.
"""

import functools
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import MethodType, UnionType
from typing import NoReturn, ParamSpec, TypeVar

import torch

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.errors import ClientError, HookError, RayflError, did_you_mean, error_text, out_of_memory, plugin_line
from rayfl.methods.base import Finished, FinishedStack, Method, Packet, Plan, Reply, ServerHalf, Stage
from rayfl.untyped import Anything

P = ParamSpec("P")
T = TypeVar("T")


def checked_hook(hook: Callable[P, T]) -> Callable[P, T]:
    """Wrap a method's hook: raise HookError if it fails or returns the wrong type.

    RayflError, out-of-memory errors and an executor's errors pass through.
    """
    method = getattr(hook, "__self__", None)
    # A static method does not know its class.
    if not isinstance(hook, MethodType):
        return hook
    name = _name_of(type(method), hook.__func__)
    if name is None:
        return hook
    kind, wanted, check = _CHECKS[name]

    # Not P.args: types of arguments would be looked up for each client.
    def call(*args: Anything, **kwargs: Anything) -> T:
        try:
            answer = hook(*args, **kwargs)
        # SystemExit too: a hook must not end the process.
        except BaseException as error:
            # The method does not cause the loss of an object or of a node.
            of_executor = type(error).__module__.partition(".")[0] in ("ray", "actors")
            if (
                of_executor
                or isinstance(error, ClientError | HookError | RayflError | KeyboardInterrupt)
                or out_of_memory(error)
            ):
                raise
            blamed = _innermost(method, error)
            raise HookError(f"{_called(blamed, name, _line(blamed, error))}: {error_text(error)}") from error
        try:
            if not isinstance(answer, kind):
                _refuse(answer, wanted)
            if check is not None:
                check(answer, method, args)
        except _WrongAnswerError as wrong:
            code = getattr(hook.__func__, "__code__", None)
            place = (code.co_filename, code.co_firstlineno) if code is not None else None
            raise HookError(f"{_called(method, name, place)} {wrong}") from None
        return answer

    return call


# One for each hook of a run, and a call for each hook of each client.
@functools.cache
def _name_of(kind: type, function: Callable[..., object]) -> str | None:
    """The name of the hook that a function is, by its place in the class: it may be a second name of another one."""
    return next((name for name in _CHECKS if getattr(kind, name, None) is function), None)


def checked(
    hook: Callable[P, T], wanted: str = "", fits: Callable[[Anything], object] = lambda value: True
) -> Callable[P, T]:
    """Wrap a hook of anything but a method: raise HookError if it fails, or if what it returns does not fit `wanted`.

    RayflError and out-of-memory errors pass through.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            returned = hook(*args, **kwargs)
        except Exception as error:
            if isinstance(error, HookError | RayflError) or out_of_memory(error):
                raise
            raise HookError(f"{hook.__qualname__}: {error_text(error)}{plugin_line(error)}") from error
        try:
            if fits(returned):
                return returned
        # A value of an unexpected type may raise anything.
        except Exception as error:  # noqa: BLE001
            if isinstance(error, _WrongAnswerError):
                raise HookError(f"{hook.__qualname__} {error}") from None
        raise HookError(f"{hook.__qualname__} must return {wanted}; it returns {returned!r:.60}")

    return call


def is_state(state: Anything, metrics: Anything) -> bool:
    """Whether these are a state, tensors by name, and metrics, numbers by name; raise an error that says why not."""
    return _require_state(state, "tensors by name") is None and _metrics(metrics) is None


A_STATE = "a state, tensors by name", lambda state: is_state(state, {})


def _innermost(method: object, error: BaseException) -> object:
    """The method inside wrappers in which an error arose."""
    inner = getattr(method, "inner", None)
    return _innermost(inner, error) if inner is not None and _line(inner, error) else method


class _WrongAnswerError(Exception):
    """Says what a hook returned and what it must return."""


def _called(method: object, hook: str, place: tuple[str, int] | None) -> str:
    """ "MyMethod.finish (my_methods.py, line 12)"."""
    where = f" ({Path(place[0]).name}, line {place[1]})" if place else ""
    return f"{type(method).__name__}.{hook}{where}"


def _line(method: object, error: BaseException) -> tuple[str, int] | None:
    """The innermost line that led to an error in the method's own file; if none did, in that of its base class."""
    frames = traceback.extract_tb(error.__traceback__)
    for kind in type(method).__mro__:
        files = {
            code.co_filename for attribute in vars(kind).values() if (code := getattr(attribute, "__code__", None))
        }
        if own_frames := [frame for frame in frames if frame.filename in files]:
            return own_frames[-1].filename, own_frames[-1].lineno or 0
    return None


def _refuse(returned: Anything, wanted: str) -> NoReturn:
    what = "nothing" if returned is None else f"a value of type {type(returned).__name__}"
    raise _WrongAnswerError(f"returns {what}; it must return {wanted}")


def _evaluated(carry: Anything, method: object, args: tuple[Anything, ...]) -> None:
    if "params" not in carry:
        raise _WrongAnswerError('returns a carry without "params", which is the model to evaluate; put it there')


def _stages(stages: Anything, method: object, args: tuple[Anything, ...]) -> None:
    names = [stage.name if isinstance(stage, Stage) else _refuse(stage, "stages alone") for stage in stages]
    if again := [name for name in names if names.count(name) > 1]:
        raise _WrongAnswerError(f"returns two stages with the name {again[0]!r}; give each a name of its own")


def _tree(returned: Anything, method: object, args: tuple[Anything, ...]) -> None:
    _require_state(returned, "tensors by name")


def _require_state(returned: Anything, wanted: str, path: str = "") -> None:
    if not isinstance(returned, dict):
        _refuse(returned, wanted)
    for name, value in returned.items():
        if isinstance(value, dict):
            _require_state(value, wanted, f"{path}{name}.")
        # A server may keep the handle of a packet that it forwards.
        elif not (isinstance(value, torch.Tensor) or callable(getattr(value, "open", None))):
            raise _WrongAnswerError(
                f"returns {f'{path}{name}'!r} as a value of type {type(value).__name__}; a state holds tensors by name"
            )


def _each(values: Anything, what: str, wanted: str, fits: Callable[[Anything], bool]) -> None:
    """Refuse `values` unless all fit and have names. `what`: what they are; `wanted`: the name of values that fit."""
    if not isinstance(values, Mapping):
        raise _WrongAnswerError(f"returns {what} of type {type(values).__name__}; give {wanted} by name")
    for name, value in values.items():
        if not fits(value):
            kind = type(value).__name__
            raise _WrongAnswerError(f"returns {what} with {name!r} as a value of type {kind}; give {wanted} by name")


def _download(download: Anything, method: object, args: tuple[Anything, ...]) -> None:
    _each(download, "a download", "trees or packets", lambda part: isinstance(part, dict | Packet))


def _is_number(value: Anything) -> bool:
    """Whether a value is a number; a tensor or an array of one number counts too."""
    return isinstance(value, Real) or (hasattr(value, "shape") and not value.shape)


def _metrics(metrics: Anything) -> None:
    _each(metrics, "metrics", "numbers", _is_number)


def _reply(reply: Anything, method: object, args: tuple[Anything, ...]) -> None:
    wanted = "packets, which ctx.downlink and rayfl.compress make,"
    _each(reply.message, "a message", wanted, lambda part: isinstance(part, Packet))
    _require_state(reply.server_memory, "a Reply whose server_memory is tensors by name")
    _metrics(reply.metrics)


def _finished(finished: Anything, method: Anything, args: tuple[Anything, ...]) -> None:
    _require_state(finished.state, "a Finished whose state is tensors by name")
    _metrics(finished.metrics)
    if not _is_number(finished.weight):
        raise _WrongAnswerError(f"returns a weight of type {type(finished.weight).__name__}; it must be a number")
    if finished.message is None:
        return
    if finished.message and getattr(method, "has_link_messages", False):
        raise _WrongAnswerError("sends a message to all, beside those of message_to; give Finished the message {}")
    _sendable(finished.message, method)


def _finished_stack(finished: Anything, method: Anything, args: tuple[Anything, ...]) -> None:
    _require_state(finished.state, "a FinishedStack whose state is tensors by name")
    _sendable(finished.trees, method)


def _sendable(message: Anything, method: Anything) -> None:
    wanted = "trees, Differences or packets"
    _each(message, "a message", wanted, lambda part: isinstance(part, dict | tree.Difference | Packet))
    read_alone = getattr(type(method), "store_uplink", ServerHalf.store_uplink) is not ServerHalf.store_uplink
    for name, part in message.items():
        # Nobody would read a tree under another name; a packet may be sent only to be billed.
        if name not in method.gather and not read_alone and not isinstance(part, Packet):
            raise _WrongAnswerError(
                f"sends {name!r}, which {type(method).__name__}.gather does not have: "
                f"{did_you_mean(name, method.gather)}"
            )


def _updated(returned: Anything, method: Anything, args: tuple[Anything, ...]) -> None:
    if len(returned) != 2:
        raise _WrongAnswerError(f"returns {len(returned)} values; it must return {_UPDATE}")
    state, metrics = returned
    _require_state(state, _UPDATE)
    _metrics(metrics)
    if not args[3].plan.down:
        # PFNM's server never sends its model, which may grow.
        return
    models = map(checked_hook(method.model), (args[0], state))
    before, now = ({name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in model.items()} for model in models)
    if changed := [name for name in before if now.get(name) != before[name]]:
        raise _WrongAnswerError(
            f"returns a model whose {changed[0]!r} is {now.get(changed[0])}, not {before[changed[0]]}: a round keeps "
            "shapes and types; convert it, as by tensor.float()"
        )


_CARRY, _STATE, _MODEL = "the carry, tensors by name", "a state, tensors by name", "a model, tensors by name"
_UPDATE = "the new server state and metrics: return {...}, {}"

_CHECKS: Mapping[
    str, tuple[type | UnionType, str, Callable[[Anything, Anything, tuple[Anything, ...]], None] | None]
] = {
    "check_model": (object, "anything", None),
    "plan": (Plan, "a Plan", lambda plan, method, args: _stages(plan.stages, method, args)),
    "stages": (tuple | list, "a tuple of stages", _stages),
    "init_params": (dict, _MODEL, _tree),
    "init_client": (dict, _STATE, _tree),
    "has_work": (bool, "True or False", None),
    "begin": (dict, _CARRY, None),
    "step": (dict, _CARRY, None),
    "end_stage": (dict, _CARRY, None),
    "finish": (Finished, "a Finished", _finished),
    "begin_stack": (dict, _CARRY, None),
    "finish_stack": (FinishedStack, "a FinishedStack", _finished_stack),
    "receive_reply": (dict, _STATE, _tree),
    "eval_begin": (dict, _CARRY, _evaluated),
    "outputs": (torch.Tensor | tuple | list | Mapping, "the outputs of a batch, a tensor or several", None),
    "final_model": (dict | None, f"{_MODEL}, or None", None),
    "init_server": (dict, _STATE, _tree),
    "init_server_memory": (dict, _STATE, _tree),
    "model": (dict, _MODEL, _tree),
    "download": (Mapping, "trees or packets by name", _download),
    "personal_message": (Reply, "a Reply", _reply),
    "store_uplink": (dict, _STATE, _tree),
    "server_update": (tuple, _UPDATE, _updated),
    "reply": (Reply, "a Reply", _reply),
    "message_to": (Mapping, "trees or packets by name", lambda sent, method, args: _sendable(sent, method)),
    "mix": (dict, _STATE, _tree),
}
"""For each hook: the type of its return value, the words for this type, and the check of what the value holds, unless
the type is enough. A carry is checked at every step."""


TreeT = TypeVar("TreeT", bound=Mapping[str, Anything])


class HookInputs:
    """What the hooks of `method` are given in one call, with the number of writes to it so far.

    A tensor counts the writes to it, so one look at the end of a call is enough. It does not count writes through
    `.data`, or through an array that shares its memory: those are found by the contract in rayfl/testing.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self._trees: list[tuple[str, Mapping[str, Anything], int]] = []
        self._messages: list[Message] = []

    def note(self, what: str, nested: TreeT) -> TreeT:
        """Note the tensors of a tree, which is called `what`, and return the tree."""
        noted = _numbers(nested)
        self._trees.append((what, noted, _writes(noted)))
        return nested

    def note_message(self, message: Message) -> None:
        """Note the trees that clients will decode (`Opened`)."""
        self._messages.append(message)

    @property
    def num_noted(self) -> int:
        """The number of trees so far."""
        return len(self._trees)

    def require_unchanged(self, since: int = 0) -> None:
        """Raise HookError if somebody has written to one of the tensors. The trees noted `since` are then forgotten:
        what belongs to one client is not kept until the end of the call."""
        for message in () if since else self._messages:
            self._trees += [
                (f"the message {key!r}", vars(packet).get("_decoded", {}), 0) for key, packet in message.items()
            ]
        for what, nested, before in self._trees[since:]:
            if _writes(nested) != before:
                most = max(tree.flatten(nested).items(), key=lambda named: named[1]._version)
                raise HookError(
                    f"{self.method.title}, or the model that it trains, changes {what} in place "
                    f"({most[0]!r}), which other clients and later rounds read: make a new tensor, such as x + y or "
                    "x.clone().add_(y) in place of x.add_(y)"
                )
        del self._trees[since:]


def _numbers(nested: Mapping[str, Anything]) -> dict[str, Anything]:
    """A tree without masks, which are unpacked into memory of their own and would be kept until the end of the call."""
    return {
        name: _numbers(leaf) if isinstance(leaf, dict) else leaf
        for name, leaf in nested.items()
        if isinstance(leaf, dict) or (isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool)
    }


def _writes(nested: Mapping[str, Anything]) -> int:
    """The number of writes to all tensors of a tree."""
    return sum([_writes(leaf) if isinstance(leaf, dict) else leaf._version for leaf in nested.values()])
