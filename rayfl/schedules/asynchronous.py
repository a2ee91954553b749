"""FedAsync: Xie, Koyejo, Gupta, Asynchronous Federated Optimization, OPT 2020 (arXiv 1903.03934), Algorithm 1."""

from pydantic import Field

from rayfl.schedules.base import AT_ONCE, NOT_YET, Flying, Now


class Asynchronous(Flying):
    """Every message makes an update: x <- (1 - a) x + a x_i, with a = `mixing` times the factor of its staleness.

    x_i is the client's model after its training. In `rayfl` clients send delta_i = x_v - x_i, where x_v is the model of
    the version v with which they began, so the server subtracts a (delta_i + x - x_v). `clients.per_round` clients are
    at work. The paper's local objective has a proximal term, which the method `fedprox` adds.
    """

    name = "asynchronous"
    mixes_models = True
    mixing: float = Field(default=0.6, gt=0, le=1, description="share of a fresh model in the update, alpha")

    def due(self, now: Now) -> float:
        return AT_ONCE if now.arrived else NOT_YET

    def scale(self, staleness: int) -> float | None:
        factor = super().scale(staleness)
        return None if factor is None else self.mixing * factor
