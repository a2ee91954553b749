"""The global generators of torch, numpy and `random`, from which models and plug-ins draw: keyed, and watched.

rayfl itself draws from generators of its own (seeding.py). Code of others may draw from the global ones, which each
process has for itself, so before a hook or a pass they get a seed of (seed, round, client, purpose). Most work draws
nothing, and a key costs ten microseconds. So `watched` does a job without keys and looks once, at its end, whether a
generator has moved; if one has, the job counts for nothing and is done again with keys.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from rayfl.determinism.seeding import NOBODY, torch_seed

T = TypeVar("T")

_PROBE = 1_403_580_810
"""The seed of generators that are watched."""
_watch: ContextVar["Watch | None"] = ContextVar("watch", default=None)
# Any: numpy's types do not name two of its functions.
_numpy: Any = np.random
_spare: list[np.random.MT19937] = []
"""Generators of numpy that no `apart` uses now; making one takes as long as six keys."""


class UnkeyedDraw(Exception):
    """Work that was watched has drawn from global generators, which had no key."""


class Watch:
    """Finds out which global generators are drawn from. What they draw meanwhile has no key."""

    def __init__(self) -> None:
        self.has_seen = False
        self._begin()

    def look(self) -> list[str]:
        """The names of the generators that were drawn from since the last look; `has_seen`: whether there ever were."""
        now = [generator.get_state() for generator in _of_torch()]
        moved = {
            "torch's": len(now) != len(self._at) or not all(map(torch.equal, now, self._at)),
            "numpy's": np.random.random() != _first_draws()[0],
            "Python's": random.random() != _first_draws()[1],
        }
        names = [name for name, has_moved in moved.items() if has_moved]
        self.has_seen |= bool(names)
        self._begin()
        return names

    def require_none(self) -> None:
        """Raise UnkeyedDraw if a generator was ever drawn from."""
        self.look()
        if self.has_seen:
            raise UnkeyedDraw

    def _begin(self) -> None:
        _seed(_PROBE)
        self._at = [generator.get_state() for generator in _of_torch()]


def key(seed: int, round_number: int = NOBODY, client: int = NOBODY, purpose: str = "") -> None:
    """Seed the global generators as `seeding.generator` would; in `watched` work they stay as they are."""
    if not is_watched():
        _seed(torch_seed(seed, round_number, client, purpose))


@contextmanager
def keyed(seed: int, round_number: int = NOBODY, client: int = NOBODY, purpose: str = "") -> Iterator[None]:
    """`key` for a while; the generators are restored afterwards."""
    with nullcontext() if is_watched() else seeded(torch_seed(seed, round_number, client, purpose)):
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators with a number for a while, and restore them."""
    with apart():
        _seed(seed)
        yield


@contextmanager
def apart() -> Iterator[None]:
    """Restore the global generators afterwards, but for the second of two normal numbers, which numpy keeps."""
    of_torch = [(generator, generator.get_state()) for generator in _of_torch()]
    of_python, of_numpy = random.getstate(), _numpy.get_bit_generator()
    lent = _spare.pop() if _spare else np.random.MT19937(0)
    _numpy.set_bit_generator(lent)
    try:
        yield
    finally:
        _spare.append(lent)
        _numpy.set_bit_generator(of_numpy)
        random.setstate(of_python)
        for generator, state in of_torch:
            generator.set_state(state)


@contextmanager
def preserved() -> Iterator[None]:
    """Context manager and decorator: restore the global generators, which may be a user's, to the last bit."""
    of_numpy = np.random.get_state()
    try:
        with apart():
            yield
    finally:
        np.random.set_state(of_numpy)


def watched(work: Callable[[], T]) -> T:
    """Do work without keys. Raise UnkeyedDraw if it has drawn from a global generator, whatever else it raised."""
    watch = Watch()
    token = _watch.set(watch)
    try:
        done = work()
    except Exception:
        watch.require_none()
        raise
    finally:
        _watch.reset(token)
    watch.require_none()
    return done


def is_watched() -> bool:
    """Whether the caller is work that `watched` does."""
    return _watch.get() is not None


def drawn_by(work: Callable[[], T]) -> tuple[T, list[str]]:
    """The result of work, and the names of the generators that it has drawn from, which had no key."""
    watch = _watch.get() or Watch()
    watch.look()
    return work(), watch.look()


def _seed(seed: int) -> None:
    # A hundredth of the time of `torch.manual_seed`, which also writes to all devices that may ever be used.
    for generator in _of_torch():
        generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _of_torch() -> list[torch.Generator]:
    """torch's generators: of the processor, and of the GPU in use."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


@cache
def _first_draws() -> tuple[float, float]:
    """What numpy's and Python's generators draw first after `_seed(_PROBE)`."""
    return np.random.RandomState(_PROBE).random_sample(), random.Random(_PROBE).random()
