"""Watches a method: logs the arguments and results of its hooks, without changing them."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import get_args, is_typeddict

import numpy as np
from torch import Tensor

from rayfl.compress.base import Compressor, Message, Packet
from rayfl.methods.base import Context, Finished, Method, PeerHalf, Reply, ServerHalf, Tree
from rayfl.rounds.setup import Setup
from rayfl.settings import Settings
from rayfl.untyped import Anything, Foreign

HOOKS = (
    *("init_client", "has_work", "stages", "begin", "step", "end_stage", "finish", "receive_reply", "eval_begin"),
    *("init_server", "init_server_memory", "model", "download", "personal_message", "store_uplink", "server_update"),
    *("final_model", "update", "reply", "mix", "message_to"),
)


@dataclass
class Log:
    """The log of a run."""

    calls: Counter[str] = field(default_factory=Counter)
    modified: list[str] = field(default_factory=list)
    """Hooks that have changed an argument or the method, as "step: carry", whichever way they wrote to it."""
    undeclared: list[str] = field(default_factory=list)
    """States and carries whose keys are not those of the `TypedDict` that a hook declares for them."""
    down: dict[tuple[int, int], list[Message]] = field(default_factory=dict)
    up: dict[tuple[int, int], dict[str, Packet]] = field(default_factory=dict)
    broadcasts: dict[int, Message] = field(default_factory=dict)
    links: dict[tuple[int, int, int], Message] = field(default_factory=dict)
    """What a peer sent to a neighbour, by round, sender and receiver, of methods with `message_to`."""
    read: set[str] = field(default_factory=set)
    """The settings of the method that its hooks have read."""
    waiting: list[tuple[dict[str, Packet], str]] = field(default_factory=list)
    """The messages, and names in them, of the packets that the engine will make next of the trees that are sent."""
    depth: int = 0
    """Number of hooks that are being called; a message of an inner hook counts for the outer one."""

    def note(self, hook: str, ctx: Context | None, result: Anything) -> None:
        """Keep the messages of a call."""
        self.calls[hook] += 1
        if ctx is None or self.depth:
            return
        if hook == "download":
            self.broadcasts[ctx.round] = self.expect(result)
        elif ctx.client is not None and isinstance(result, Reply):
            self.down.setdefault((ctx.round, ctx.client.id), []).append(result.message)
        elif ctx.client is not None and isinstance(result, Finished) and result.message is not None:
            self.up[ctx.round, ctx.client.id] = self.expect(result.message)

    def expect(self, parts: Mapping[str, object]) -> dict[str, Packet]:
        """The packets among `parts`; those that the engine makes of the trees are added later."""
        packets = {name: part for name, part in parts.items() if isinstance(part, Packet)}
        self.waiting = [(packets, name) for name in parts if name not in packets]
        return packets


def watched_compressor(uplink: Compressor, log: Log) -> Compressor:
    """The same compressor, but it logs the packets that the engine makes of trees."""

    def encode(self: Compressor, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        packet, memory = type(uplink).encode(self, x, memory, generator)
        if log.waiting and not log.depth:
            message, name = log.waiting.pop(0)
            message[name] = packet
        return packet, memory

    # Only a written packet shows its buffers.
    kind = type("Watched", (type(uplink),), {"encode": encode, "encode_difference": Compressor.encode_difference})
    return kind(**{name: getattr(uplink, name) for name in type(uplink).model_fields})


def watched_settings(settings: Settings, log: Log) -> Settings:
    """The same settings, but they log the names of those that are read."""
    plain = type(settings)

    def read(self: Settings, name: str) -> Anything:
        if name in plain.model_fields:
            log.read.add(name)
        return plain.__getattribute__(self, name)

    kind = type("Watched", (plain,), {"__module__": plain.__module__, "__getattribute__": read})
    return kind.model_construct(**dict(settings))


def watched(setup: Setup) -> tuple[Setup, Log]:
    """The setup with its method under watch."""
    log, method = Log(), setup.method
    hooks = {name: _watch(name, getattr(type(method), name), log) for name in HOOKS if _own(method, name)}
    # The class is in the method's own module, so that it gets the method's name.
    kind = type("Watched", (type(method),), {"__module__": type(method).__module__, **hooks})
    copied = kind.__new__(kind)
    # Cached properties are left out, because they may have read settings before.
    vars(copied).update(own_values(method), hyper=watched_settings(method.hyper, log))
    return replace(
        setup,
        method=copied,
        uplink=watched_compressor(setup.uplink, log),
        downlink=watched_compressor(setup.downlink, log),
    ), log


def _own(method: Method, hook: str) -> bool:
    """Whether a hook is watched. The server's defaults are not, so that `overrides` stays the same; all updates are."""
    defined = getattr(type(method), hook, None)
    default = PeerHalf.message_to if hook == "message_to" else getattr(ServerHalf, hook, None)
    return defined is not None and (defined is not default or hook == "server_update")


def _watch(name: str, hook: Callable[..., Anything], log: Log) -> Callable[..., Anything]:
    declared = inspect.get_annotations(hook)
    parameters = list(inspect.signature(hook).parameters)[1:]

    @functools.wraps(hook)
    def call(self: Method, *args: Anything, **kwargs: Anything) -> Anything:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs, "self": own_values(self)}
        before = {part: fingerprint(value) for part, value in arguments.items()}
        log.depth += 1
        result = hook(self, *args, **kwargs)
        log.depth -= 1
        arguments["self"] = own_values(self)
        log.modified += [f"{name}: {part}" for part, value in arguments.items() if fingerprint(value) != before[part]]
        values = {**dict(zip(parameters, args, strict=False)), **kwargs, "return": result}
        log.undeclared += [f"{name}: {part}" for part in values if not fits(part, values[part], declared.get(part))]
        log.note(name, next((arg for arg in args if isinstance(arg, Context)), None), result)
        if name == "message_to" and not log.depth:
            log.links[args[2].round, args[2].traits.id, args[1]] = log.expect(result)
        return result

    return call


def fits(part: str, value: Foreign, declared: Foreign) -> bool:
    """Whether a dictionary has the keys that its `TypedDict` declares; True for other values.

    A result may not have other keys. An argument may, since a method may derive from another.
    """
    kind = next((option for option in get_args(declared) or (declared,) if is_typeddict(option)), None)
    if kind is None or not isinstance(value, Mapping):
        return True
    return kind.__required_keys__ <= value.keys() and (part != "return" or value.keys() <= kind.__annotations__.keys())


def own_values(method: Method) -> dict[str, Anything]:
    """The attributes of a method, without cached properties, which follow from the others."""
    return {
        name: value
        for name, value in vars(method).items()
        if not isinstance(getattr(type(method), name, None), functools.cached_property)
    }


def fingerprint(value: Anything) -> Anything:
    """All numbers below `value`, in order, as something that can be compared."""
    if isinstance(value, Tensor | np.ndarray):
        return np.asarray(value.detach() if isinstance(value, Tensor) else value).tobytes()
    if isinstance(value, Mapping):
        return [(key, fingerprint(part)) for key, part in value.items()]
    if isinstance(value, (tuple, list)):
        return [fingerprint(part) for part in value]
    if isinstance(value, Packet):
        # The decoded tree, which a packet may keep, is not among its fields.
        return [fingerprint(value.parts), fingerprint(value.decode())]
    if is_dataclass(value) and not isinstance(value, type):
        return [fingerprint(getattr(value, part.name)) for part in fields(value)]
    return value if isinstance(value, (int, float, str, bool)) else id(value)


def buffer_bits(message: Message) -> int:
    """Eight times the bytes of every buffer of every packet."""
    return 8 * sum(len(part.tobytes()) for packet in message.values() for part in packet.parts.values())
