"""Differential privacy of whole clients: central (a server that is trusted adds noise), and local (each client does).

Central: McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018, with a
fixed denominator; with a quantile Andrew et al., NeurIPS 2021. Noise is drawn from the experiment's seed: epsilon is
that of the mechanism, so that its cost can be studied; a simulation does not protect data.
"""

import functools
import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from rayfl.compress.sparse import TopK
from rayfl.compress.threshold import Threshold
from rayfl.determinism import seeding
from rayfl.methods.base import (
    Context,
    Dense,
    Field,
    Metrics,
    RayflError,
    Received,
    State,
    Sum,
    Tree,
    WeightedMean,
    tree,
    unused_with,
)
from rayfl.rounds.setup import Setup
from rayfl.selections.base import Selection
from rayfl.selections.plain import Poisson
from rayfl.wrappers.attack import noise
from rayfl.wrappers.base import KEY, require_uniform_weights
from rayfl.wrappers.clip import WITHIN, Clip

ORDERS = [1 + tenth / 10 for tenth in range(1, 100)] + [*range(12, 64), 80, 128, 256, 512, 1024]
"""The orders of Renyi divergence over which the accountant minimises epsilon."""


@functools.cache
def one_round(noise_multiplier: float, rate: float) -> np.ndarray:
    """The Renyi divergence of one round for each of ORDERS, float64 [num_orders], by Opacus's accountant."""
    # Opacus imports most of torch; only runs with differential privacy wait for it.
    from opacus.accountants.analysis import rdp

    return np.array(rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=ORDERS))


def epsilon(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """Epsilon after `rounds` rounds of the Gaussian mechanism with Poisson sampling at `rate` (1: no sampling).

    The Renyi divergence of all rounds is that of one round times their number.
    """
    from opacus.accountants.analysis import rdp

    spent = (rounds * one_round(noise_multiplier, rate)).tolist()
    with warnings.catch_warnings():
        # opacus advises other orders where the first or the last one is best; the bound holds with any.
        warnings.simplefilter("ignore")
        return float(rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=delta)[0])


class Private(Clip):
    """The part that central and local differential privacy share: clipping before noise."""

    sees_all = True
    noise_multiplier: float = Field(
        default=1.0, gt=0, description="standard deviation of the noise, as a multiple of the norm, z"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta of (epsilon, delta)")

    def check(self, setup: Setup, store_bytes: int) -> None:
        if importlib.util.find_spec("opacus") is None:
            raise RayflError(f": {self.name!r} needs opacus; run: pip install 'rayfl[privacy]'", KEY)
        require_uniform_weights(self.name, setup.method)
        selection = setup.selection
        if selection.hears_losses or type(selection).candidates is not Selection.candidates:
            raise self.broken(f"selection={selection.name!r} gets losses without noise; take 'poisson'")

    def broken(self, why: str) -> RayflError:
        """The error for an experiment that would not be private."""
        return RayflError(f": with {self.name!r} the run would not be private: {why}", KEY)


class CentralDP(Private):
    """The server adds noise of standard deviation z S to the sum of messages of norm at most S, and divides by the
    expected number of clients. It does so in every round, even if no client is selected.

    `privacy/epsilon` of a round covers all rounds so far, and compares two experiments of which one has one client
    more. Clients that drop out do not change it. All messages of a client are clipped and get noise together.
    """

    name = "central-dp"
    needs_server = True
    adjacency: Literal["add-or-remove"] = Field(
        default="add-or-remove", description="epsilon compares experiments with and without one client"
    )
    count_noise: float | None = Field(
        default=None,
        gt=0,
        description="standard deviation of the noise on the number of clients within the norm; default: per_round / 20",
        json_schema_extra=unused_with(quantile=[None]),
    )

    def check(self, setup: Setup, store_bytes: int) -> None:
        super().check(setup, store_bytes)
        clients, uplink = setup.population.settings, setup.uplink
        if type(setup.selection) is not Poisson and clients.num_selected < clients.num_seen:
            raise self.broken("the accountant knows Poisson sampling; give selection='poisson'")
        if clients.take_first is not None:
            raise self.broken("with clients.take_first a client decides whether others arrive; remove it")
        dense = isinstance(uplink, Dense) and uplink.dtype == "fp32"
        if not dense and not (isinstance(uplink, TopK | Threshold) and uplink.values == "fp32"):
            raise self.broken(
                f"a message decoded from uplink={uplink.name!r} may have a larger norm than the clipped one; take "
                "dense, topk or threshold, with fp32"
            )
        half, others = setup.server_half, {type(rule) for rule in setup.method.gather.values()} - {Sum, WeightedMean}
        if others or any(half.overrides(hook) for hook in ("personal_message", "reply", "store_uplink")):
            raise self.broken("the method's server looks at single messages; take fedavg or scaffold, for example")
        if self.quantile is not None and 2 * (self.count_noise or clients.num_selected / 20) <= self.noise_multiplier:
            raise RayflError(
                f": count_noise of 'central-dp' must be above noise_multiplier / 2 = {self.noise_multiplier / 2:g}", KEY
            )

    def multiplier(self, count_deviation: float) -> float:
        """The multiplier of the noise on messages; with a quantile, which uses a part of epsilon, it is larger."""
        z = self.noise_multiplier
        return z if self.quantile is None else (z**-2 - (2 * count_deviation) ** -2) ** -0.5

    def aggregate(self, received: Received, server: State, ctx: Context) -> tuple[Received, State, Metrics]:
        noise_ctx = replace(ctx, draws=seeding.LazyGenerator(ctx.seed, ctx.round, purpose="privacy noise"))
        expected, bound, noisy = ctx.num_selected, float(server.get("norm", self.norm)), dict(received)
        of_count = self.count_noise or expected / 20
        # In a round without uploads nothing is released.
        for name, gathered in received.items() if ctx.plan.up else ():
            total = gathered.sum or ({"within": torch.zeros(1)} if name == WITHIN else tree.zeros_like(ctx.initial))
            deviation = of_count if name == WITHIN else self.multiplier(of_count) * bound
            total = tree.add(total, noise(total, deviation, noise_ctx))
            noisy[name] = replace(gathered, sums=(total,), weight=float(expected), count=expected)
        noisy, server, metrics = super().aggregate(noisy, server, ctx)
        spent = epsilon(self.noise_multiplier, expected / ctx.num_clients, ctx.round + 1, self.delta)
        return noisy, server, {**metrics, "clip/bound": bound, "privacy/epsilon": spent}


class LocalDP(Private):
    """Every client clips its message to norm S and adds noise of standard deviation z S before it sends it.

    The messages for any two data sets of a client differ by at most 2 S. `privacy/epsilon` is that of a client that
    has taken part in every round so far, without amplification by sampling.
    """

    name = "local-dp"
    adjacency: Literal["replace"] = Field(
        default="replace", description="epsilon compares any two data sets of one client"
    )
    quantile: float | None = Field(
        default=None,
        description="cannot be given: clients would report without noise whether they were within the norm",
        json_schema_extra=unused_with(adjacency=["replace"]),
    )

    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        sent, state, metrics = super().client(trees, state, received, ctx)
        sent = {
            name: tree.add(update, noise(update, self.noise_multiplier * self.norm, ctx))
            for name, update in sent.items()
        }
        return sent, state, {**metrics, "privacy/epsilon": self._spent(ctx)}

    def aggregate(self, received: Received, server: State, ctx: Context) -> tuple[Received, State, Metrics]:
        """See `MessageWrapper`. Record epsilon of this round: under a schedule the clients' own values, whose mean is
        recorded otherwise, are of earlier rounds and too low."""
        received, server, metrics = super().aggregate(received, server, ctx)
        return received, server, {**metrics, "privacy/epsilon": self._spent(ctx)}

    def _spent(self, ctx: Context) -> float:
        return epsilon(self.noise_multiplier / 2, 1.0, ctx.round + 1, self.delta)
