"""Matching of hidden neurons between fully connected networks under a Beta-Bernoulli prior.

Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019, Sections 3.1 and 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Layer = tuple[np.ndarray, np.ndarray]
"""Weights [out, in] and biases [out] of one layer."""


@dataclass(frozen=True)
class Prior:
    """The model of neurons: a global one is N(mean, sigma0^2), a local one N(global one, sigma^2); mass gamma."""

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
        # Here, since it loads for longer than all methods together.
        from scipy.optimize import linear_sum_assignment

        local, known = self.neurons[network], len(self.total)
        _, columns = linear_sum_assignment(self.scores(local), maximize=True)
        # Which new neuron has which rank does not change the sum: they are numbered in the network's order.
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
        # Summed anew: subtracting would leave rounding behind.
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
        found = prior.estimate(matching.total, matching.count, mean, posterior)
        merged.insert(0, (found[:, num_inputs + 1 :].T, bias))
        bias, places, width = found[:, num_inputs], matching.assigned, len(found)
        if layer == 0:
            merged.insert(0, (found[:, :num_inputs], bias))
    return merged
