"""The policy for kinds of machine: which ones may compute a run together.

Those that compute the same bits may, or all of them if the run is mixed. This file does not use Ray; actors/pool.py
applies the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfl.determinism.platform import DECISIVE, Platform, commonest, differences, kinds_besides, listed, with_kind


@dataclass(frozen=True)
class Verdict:
    """Whether an actor may work, and a sentence for the user, which may be empty."""

    admitted: bool
    notice: str = ""


class Machines:
    """The kinds of machine that compute a run. `platform`: the leading one, in the form of platform.json; {}: none yet.

    A resumed run keeps the kind with which it began. A new run takes the kind of most of its first actors.
    """

    def __init__(self, platform: Platform, mixed: bool = False, resume: str = "rayfl resume DIR") -> None:
        self.platform, self.mixed, self._resume = platform, mixed, resume
        self._differences: list[str] = []

    def lead(self, found: Sequence[Platform]) -> None:
        """Make the most common platform in `found` the run's platform, unless the run has one."""
        if not self.platform:
            self.platform = commonest(found)
        # Ray, Python and the number of cores may have changed since the run was stopped.
        alike = next((one for one in found if not differences(self.platform, one)), {})
        self.platform = {**self.platform, **{key: value for key, value in alike.items() if key not in DECISIVE}}

    def admit(self, found: Platform, address: str) -> Verdict:
        """Whether an actor of this kind, on the node at `address`, may work. A mixed run records the kind."""
        unlike = differences(self.platform, found)
        if not unlike:
            return Verdict(True)
        if self.mixed:
            known = len(kinds_besides(self.platform))
            self.platform = with_kind(self.platform, found)
            notice = (
                f"node {address} works too, because runtime.mixed is set, although the run has {listed(unlike)}: the "
                "results depend on which node does what"
            )
            return Verdict(True, notice if len(kinds_besides(self.platform)) > known else "")
        self._differences = unlike
        return Verdict(False, f"node {address} is not used, because the run has {listed(unlike)}")

    def none_left(self) -> str:
        """The error for a run if no node is left that computes the same bits; "" if no node was excluded."""
        if not self._differences:
            return ""
        return (
            f"no node is left that computes the same bits: the run has {listed(self._differences)}; go on with nodes "
            f"like those: {self._resume}, or accept other bits: {self._resume} runtime.mixed=true"
        )
