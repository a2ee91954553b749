"""The part that both forms of FedU share: the Laplacian of a graph over clients, and the bound on the step along it.

min over all w_k of sum_k f_k(w_k) + (eta / 2) sum over unordered pairs {k, l} of a_kl ||w_k - w_l||^2. The gradient of
the second sum at w_k is eta sum_l a_kl (w_k - w_l), once per pair: WEN Hao's slides count each pair twice, which
makes theirs twice as large.
"""

from rayfl.methods.base import Field, RayflError
from rayfl.methods.shared.local_training import LocalWork
from rayfl.topology.graphs import Topology, largest_laplacian_eigenvalue


class LaplacianHyper(LocalWork):
    """Hyper-parameters of FedU; a_kl is 1 for every link of the topology, or its Metropolis weight."""

    lap_step: float = Field(
        default=0.1, ge=0, description="step along the Laplacian, mu_t eta; below 2 / its largest eigenvalue"
    )


def check_lap_step(lap_step: float, topology: Topology | None, num_clients: int, seed: int) -> None:
    """Raise RayflError if the step is not stable: from lambda_max * step = 2 on some disagreement never shrinks."""
    assert topology is not None
    largest = largest_laplacian_eigenvalue(topology, num_clients, seed)
    # Eigenvalues come with rounding errors.
    if lap_step * largest >= 2 - 1e-9:
        raise RayflError(
            f"method.lap_step={lap_step:g} times {largest:.4g}, the largest eigenvalue of the graph's Laplacian, must "
            f"be below 2; set lap_step below {2 / largest:.4g} (up to {1 / largest:.4g} nothing overshoots)"
        )
