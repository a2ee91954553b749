"""The first SIGINT or SIGTERM asks a run to stop after its round; the second one interrupts it at once."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

_REPEAT_S = 0.2
"""Ignore a repeated signal within this time: the process group and the parent both deliver it."""
_REPEAT_AT_START_S = 1.0
"""The same before a run has begun, when the process may be busy with imports and there is no second stage."""


def interrupt_once() -> None:
    """Let SIGINT raise KeyboardInterrupt, but not twice if both the process group and the parent deliver it.

    The second one would come while the first is being reported. A SIGINT that the caller ignores stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Interrupt(lambda: None, {}, asked=True, repeat_s=_REPEAT_AT_START_S))


@contextmanager
def stoppable(on_stop: Callable[[], object] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a first SIGINT or SIGTERM has come; that signal also calls `on_stop`.

    The next signal raises KeyboardInterrupt. A first signal inside two nested blocks calls both functions. Outside the
    main thread, which alone may handle signals, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    interrupt = Interrupt(on_stop, {number: signal.getsignal(number) for number in numbers})
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield lambda: interrupt.asked
    finally:
        for number, handler in interrupt.before.items():
            signal.signal(number, handler)


@dataclass
class Interrupt:
    """A signal handler; `before` has the handlers that it replaces."""

    on_stop: Callable[[], object]
    # Any: a handler is a function, a number that stands for one, or None.
    before: Mapping[int, Any]
    asked: bool = False
    repeat_s: float = _REPEAT_S
    last: tuple[int, float] = (0, -math.inf)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        (before, moment), self.last = self.last, (number, time.monotonic())
        if number == before and self.last[1] - moment < self.repeat_s:
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.on_stop()
        outer = self.before[number]
        if isinstance(outer, Interrupt) and not outer.asked:
            outer(number, frame)
