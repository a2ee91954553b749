"""MOON: Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.

A client minimises f_i(y) + mu l_con(y) by local steps from the x_t that it received; the rest is FedAvg. With the
representations z = R_y(a), z_g = R_{x_t}(a) and z_p = R_{prev_i}(a) of an example a, where prev_i is the client's model
after its last round (x_0 before its first), with s_g = cos(z, z_g), s_p = cos(z, z_p) and the temperature T,

l_con = -log(e^{s_g / T} / (e^{s_g / T} + e^{s_p / T})) = log(1 + e^{(s_p - s_g) / T}), averaged over the batch.

- A representation is the input of the model's head, its last linear layer. So the paper's projection head is a part of
  the model: `mlp` with `hidden = [200, 256]` has a projection of 256 units. Only classifiers have representations.
- z_g and z_p have no gradient and are computed in evaluation mode. Norms below 1e-8 count as 1e-8.
- In round 0 z_g = z_p, so l_con is log 2 with gradient 0, and the round equals FedAvg's bit for bit.
- A client that is absent, or whose upload is lost, keeps its prev_i.
- Three forward passes and one backward pass cost 5/3 of FedAvg's operations. Messages are those of FedAvg.
- The recorded training loss is f_i + mu l_con. The paper has mu = 5, 10 and 1 for CIFAR-10, CIFAR-100 and
  Tiny-ImageNet, and its code 1 by default.
"""

import torch
from torch.nn import functional

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    Message,
    ModelState,
    Stage,
    Tree,
    unused_with,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, OwnModel


class MOONHyper(LocalTraining):
    """Hyper-parameters of MOON."""

    mu: float = Field(default=1.0, ge=0, description="weight of the contrastive term, mu")
    temperature: float = Field(
        default=0.5, gt=0, description="temperature of the similarities, T", json_schema_extra=unused_with(mu=[0])
    )


class MOONCarry(LocalCarry):
    """A client's carry."""

    previous: Tree  # prev_i


class MOON(OwnModel, FedAvg):
    """Client: y <- y - eta_l grad (f_i + mu l_con)(y). Client state: prev_i."""

    hyper: MOONHyper
    paper = "Li et al., CVPR 2021"
    capabilities = Capabilities(on_device=True, takes_stale=True, personalized=False, needs_features=True)

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 5 / 3

    def begin(self, state: ModelState, received: Message, ctx: Context) -> MOONCarry:
        return {**self.start(received["model"].decode()), "previous": state["params"]}

    def step(self, carry: MOONCarry, batch: Batch, *, stage: Stage) -> MOONCarry:
        others = torch.stack(
            [
                self.task.loss_and_features(params, batch, training=False)[1]
                for params in (carry["received"], carry["previous"])
            ]
        )

        def objective(params: Tree, batch: Batch) -> torch.Tensor:
            loss, features = self.task.loss_and_features(params, batch)
            # One call gives both similarities, so that their gradients cancel to exactly 0 if they are equal.
            near, old = functional.cosine_similarity(features, others, dim=2).unbind()
            return loss + self.hyper.mu * batch.mean(functional.softplus((old - near) / self.hyper.temperature))

        loss, gradient = self.task.value_and_grad(carry["params"], batch, objective)
        return self.descend(carry, loss, gradient, stage)

    def finish(self, state: ModelState, carry: MOONCarry, ctx: Context) -> Finished:
        return super().finish({"params": carry["params"]}, carry, ctx)
