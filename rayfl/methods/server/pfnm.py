"""PFNM: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019, Algorithm 1.

Clients train networks of their own; the server matches their hidden neurons and merges those that correspond to each
other. One upload is enough (`rounds = 1`). In further rounds clients continue to train their own networks, the server
sends nothing, and every round ends with a new matching of the networks that arrived.

- Fully connected ReLU networks with biases only. The global model may be wider than the clients' ones.
- The log odds of an existing neuron count once, as in the authors' code (the paper has them twice); its caps on counts
  and on the layer's width are left out, and so are its class counts as precisions of the output layer.
- A global neuron is the mean of its local ones, so that equal networks merge into themselves;
  `estimate="posterior"` draws it towards the prior mean as the paper does.
- Networks are sent in float32, not compressed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rayfl.methods.base import (
    BoundTask,
    Capabilities,
    Collect,
    Context,
    Delivered,
    Dense,
    Field,
    Finished,
    FirstDraws,
    HyperParameters,
    KeptModel,
    Metrics,
    ModelState,
    Plan,
    RayflError,
    Received,
    Traits,
    Tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork
from rayfl.task import NetworkTask

Layer = tuple[np.ndarray, np.ndarray]
"""Weights [out, in] and biases [out] of one layer."""


class PFNMHyper(LocalWork):
    """Hyper-parameters of PFNM."""

    sigma: float = Field(default=1.0, gt=0, description="standard deviation of local neurons around their global one")
    sigma0: float = Field(default=1.0, gt=0, description="standard deviation of global neurons around the prior mean")
    gamma: float = Field(default=1.0, gt=0, description="mass of the Beta process: larger makes more neurons")
    prior_bias: float = Field(default=0.1, description="prior mean of a neuron's bias, mu0; that of its weights is 0")
    sweeps: int = Field(default=5, ge=0, description="how often every network is matched again")
    estimate: Literal["mean", "posterior"] = Field(default="mean", description="estimate of a global neuron")
    independent_start: bool = Field(default=False, description="every client starts from random weights of its own")


class PFNM(GradientMethod, KeptModel):
    """Client state: its own network. Server: the merged network. Raise RayflError unless the model is an MLP."""

    hyper: PFNMHyper
    paper = "Yurochkin et al., ICML 2019"
    capabilities = Capabilities(on_device=True, own_compression=True)
    gather = {"model": Collect()}

    # Any: see Method.
    @classmethod
    def unused(cls, hyper: Any) -> Mapping[str, str]:
        return {**super().unused(hyper), "clients.downlink_mbps": f"as {cls.__name__} sends nothing to its clients"}

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(task, hyper, **settings)
        if task is not None and not _fully_connected(task):
            raise RayflError(
                "pfnm matches the hidden neurons of fully connected ReLU networks; use model 'mlp' with hidden layers"
            )

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(round_number),), down=False)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ModelState:
        return {"params": self.task.init(int(draws.own.integers(2**63))) if self.hyper.independent_start else params}

    def finish(self, state: ModelState, carry: LocalCarry, ctx: Context) -> Finished:
        packet, _ = Dense().encode(carry["params"], {}, ctx.generator)
        return Finished({"params": carry["params"]}, {"model": packet}, metrics=self.train_loss(carry, ctx))

    def server_update(
        self, server: ModelState, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[ModelState, Metrics]:
        networks = [layers(item) for item in received["model"].items.values() if isinstance(item, dict)]
        if not networks:
            return server, {}
        hyper = self.hyper
        prior = Prior(hyper.sigma, hyper.sigma0, hyper.gamma, hyper.prior_bias)
        merged = merge(networks, prior, hyper.sweeps, hyper.estimate == "posterior", ctx.generator)
        tensors = (torch.from_numpy(np.ascontiguousarray(part, np.float32)) for layer in merged for part in layer)
        params = dict(zip(server["params"], tensors, strict=True))
        return {"params": params}, {"pfnm/hidden_neurons": float(sum(len(bias) for _, bias in merged[:-1]))}


def layers(params: Tree) -> list[Layer]:
    """Weights and biases layer by layer, from the input to the output, in float64."""
    arrays = [tensor.detach().numpy().astype(np.float64) for tensor in params.values()]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def _fully_connected(task: BoundTask) -> bool:
    """Whether the network is linear layers with biases and a ReLU after each of them but the last."""
    if not isinstance(task, NetworkTask):
        return False
    parts = [part for part in task.network.module.modules() if not isinstance(part, nn.Sequential | nn.Flatten)]
    alternating = all(isinstance(part, kind) for part, kind in zip(parts, cycle((nn.Linear, nn.ReLU)), strict=False))
    biased = [name for _, name, _ in task.network.slots] == ["weight", "bias"] * (len(parts) // 2 + 1)
    return len(parts) > 2 and len(parts) % 2 == 1 and alternating and biased


@dataclass(frozen=True)
class Prior:
    """The model of neurons: a global one is N(mean, sigma0^2), a local one N(global one, sigma^2); mass gamma.

    It and the matching are those of sections 3.1 and 3.2.
    """

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 1.0
    bias: float = 0.1
    """The prior mean of a neuron's bias, mu0; that of all its weights is 0."""

    def estimate(self, total: np.ndarray, count: np.ndarray, mean: np.ndarray, posterior: bool) -> np.ndarray:
        """Global neurons [n, dim] from the sums [n, dim] of `count` [n] local ones: their mean, or the posterior's."""
        if not posterior:
            return total / count[:, None]
        precision = 1 / self.sigma0**2 + count / self.sigma**2
        return (mean / self.sigma0**2 + total / self.sigma**2) / precision[:, None]


class Matching:
    """Local neurons of J networks assigned to global ones, one network after another.

    `neurons[j]`: float64 [L_j, dim]. `assigned[j]`: the global neuron of each local one, no two of a network the same.
    """

    def __init__(self, neurons: Sequence[np.ndarray], mean: np.ndarray, prior: Prior) -> None:
        self.neurons, self.mean, self.prior = neurons, mean, prior
        self.assigned: list[np.ndarray] = [np.array([], dtype=np.int64) for _ in neurons]
        self.total = np.zeros((0, len(mean)))
        self.count = np.zeros(0, dtype=np.int64)

    def run(self, sweeps: int, generator: np.random.Generator) -> None:
        """Assign the networks from the widest to the narrowest, then each again in random order, `sweeps` times."""
        for network in sorted(range(len(self.neurons)), key=lambda j: -len(self.neurons[j])):
            self.assign(network)
        for _ in range(sweeps):
            for network in generator.permutation(len(self.neurons)):
                self.remove(network)
                self.assign(network)

    def scores(self, local: np.ndarray) -> np.ndarray:
        """The gain [L, K + L] of matching each local neuron [L, dim] to each of K global ones, or to a new one."""
        prior, num_networks = self.prior, len(self.neurons)
        shift, a, b = self.mean / prior.sigma0**2, 1 / prior.sigma0**2, 1 / prior.sigma**2
        scaled, size = local * b, (local**2).sum(axis=1, keepdims=True) * b**2
        known = shift + self.total * b
        square = (known**2).sum(axis=1)
        existing = (square + 2 * scaled @ known.T + size) / (a + b * (self.count + 1)) - square / (a + b * self.count)
        existing += np.log(self.count / (num_networks - self.count))
        alone = ((scaled + shift) ** 2).sum(axis=1, keepdims=True) / (a + b) - (shift**2).sum() / a
        ranks = np.arange(1, len(local) + 1)
        return np.hstack([existing, alone - 2 * np.log(ranks) + 2 * np.log(prior.gamma / num_networks)])

    def assign(self, network: int) -> None:
        """Put a network's neurons where the sum of their scores is largest (Hungarian method)."""
        # Imported here, because it takes longer to load than all methods together.
        from scipy.optimize import linear_sum_assignment

        local, known = self.neurons[network], len(self.total)
        _, columns = linear_sum_assignment(self.scores(local), maximize=True)
        # The sum does not depend on which new neuron has which rank: they are numbered in the network's order.
        fresh = np.flatnonzero(columns >= known)
        columns[fresh] = known + np.arange(len(fresh))
        self.total = np.vstack([self.total, np.zeros((len(fresh), len(self.mean)))])
        self.count = np.append(self.count, np.zeros(len(fresh), dtype=np.int64))
        self.total[columns] += local
        self.count[columns] += 1
        self.assigned[network] = columns

    def remove(self, network: int) -> None:
        """Remove a network's neurons; global neurons that no other network has disappear."""
        columns = self.assigned[network]
        self.assigned[network] = columns[:0]
        self.count[columns] -= 1
        stays = self.count > 0
        place = np.cumsum(stays) - 1
        self.assigned = [place[each] for each in self.assigned]
        self.count = self.count[stays]
        # Summed again, because subtracting would leave rounding errors.
        self.total = np.zeros((len(self.count), len(self.mean)))
        for each, neurons in zip(self.assigned, self.neurons, strict=True):
            if len(each):
                self.total[each] += neurons


def merge(
    networks: Sequence[Sequence[Layer]], prior: Prior, sweeps: int, posterior: bool, generator: np.random.Generator
) -> list[Layer]:
    """One network from several with the same inputs, outputs and number of layers; its hidden layers may be wider.

    Hidden layers are matched from the last to the first, by the bias and the outgoing weights, and in the first by the
    incoming weights too. Outgoing weights to neurons that a network does not have are 0.
    """
    outputs = len(networks[0][-1][1])
    places, width = [np.arange(outputs) for _ in networks], outputs
    count = np.array([len(networks)])
    biases = np.stack([network[-1][1] for network in networks]).sum(axis=0, keepdims=True)
    bias = prior.estimate(biases, count, np.full(outputs, prior.bias), posterior)[0]
    merged: list[Layer] = []
    for layer in reversed(range(len(networks[0]) - 1)):
        neurons = []
        for network, place in zip(networks, places, strict=True):
            outgoing = np.zeros((len(network[layer][1]), width))
            outgoing[:, place] = network[layer + 1][0].T
            incoming = network[layer][0] if layer == 0 else np.zeros((len(outgoing), 0))
            neurons.append(np.hstack([incoming, network[layer][1][:, None], outgoing]))
        num_inputs = networks[0][0][0].shape[1] if layer == 0 else 0
        mean = np.zeros(num_inputs + 1 + width)
        mean[num_inputs] = prior.bias
        matching = Matching(neurons, mean, prior)
        matching.run(sweeps, generator)
        estimates = prior.estimate(matching.total, matching.count, mean, posterior)
        merged.insert(0, (estimates[:, num_inputs + 1 :].T, bias))
        bias, places, width = estimates[:, num_inputs], matching.assigned, len(estimates)
        if layer == 0:
            merged.insert(0, (estimates[:, :num_inputs], bias))
    return merged
