"""FedOpt: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2: FedAdagrad, FedAdam and FedYogi.

With Delta the averaged delta: d <- beta1 d + (1 - beta1) Delta; Adagrad v <- v + d^2, Adam v <- beta2 v +
(1 - beta2) d^2, Yogi v <- v - (1 - beta2) d^2 sign(v - d^2); x <- x - eta_g d / (sqrt(v) + tau). v starts at tau^2 and
there is no bias correction. The sign is ours: Delta = received - trained.

- The algorithm as WEN Hao's slides print it squares d; a later version of the paper squares Delta
  (`second_moment = "raw"`).
- The mean over clients is by samples like FedAvg's, where the algorithm prints a plain one (`weighting = "uniform"`).
- A round in which nothing arrives leaves x and both moments alone.
- eta_g is searched from 1e-3 to 1 in the paper; server_lr = 0.01 is our choice.
"""

from typing import Literal

from rayfl.methods.base import Capabilities, Field, unused_with
from rayfl.methods.shared.optimizers import Adagrad, AdaptiveAdam, Optimizer, SecondMoment, Yogi
from rayfl.methods.shared.server_optimizer import ServerStepping, ServerSteps


class FedOptHyper(ServerSteps):
    """Hyper-parameters of FedOpt; `optimizer` is the clients'."""

    server_optimizer: Literal["adagrad", "adam", "yogi"] = Field(default="adam", description="optimizer of the server")
    server_lr: float = Field(default=0.01, gt=0, description="learning rate of the server, eta_g")
    beta1: float | None = Field(
        default=None, ge=0, lt=1, description="momentum of the server (left out: 0.9, and 0 with adagrad)"
    )
    beta2: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="memory of the second moment, of adam and yogi",
        json_schema_extra=unused_with(server_optimizer=["adagrad"]),
    )
    tau: float = Field(default=1e-3, gt=0, description="adaptivity: added to the root of the second moment")
    second_moment: SecondMoment = Field(
        default="momentum", description="what is squared: the mean with momentum, or the raw delta"
    )


class FedOpt(ServerStepping):
    """Server state: x, and d and v as the optimizer's mean and square."""

    hyper: FedOptHyper
    paper = "Reddi et al., ICLR 2021"
    capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)

    @property
    def server_optimizer(self) -> Optimizer:
        hyper = self.hyper
        kind = {"adagrad": Adagrad, "adam": AdaptiveAdam, "yogi": Yogi}[hyper.server_optimizer]
        beta1 = (0.0 if kind is Adagrad else 0.9) if hyper.beta1 is None else hyper.beta1
        beta2 = {} if kind is Adagrad else {"beta2": hyper.beta2}
        return kind(beta1=beta1, tau=hyper.tau, second_moment=hyper.second_moment, **beta2)
