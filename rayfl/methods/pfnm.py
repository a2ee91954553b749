"""PFNM: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019, Algorithm 1.

Clients train networks of their own; the server matches their hidden neurons and merges those that belong together. One
upload is enough (`rounds = 1`). In more rounds the clients train on from where they are, nothing comes down, and every
round ends with a fresh match of the networks that arrived.

- Fully connected ReLU networks with biases only. The global model may be wider than the clients' ones.
- The log odds of an existing neuron count once, as in the authors' code (the paper has them twice); its caps on counts
  and on the layer's width are left out, and so are its class counts as precisions of the output layer.
- A global neuron is the mean of its local ones, so that equal networks merge into themselves;
  `estimate="posterior"` draws it towards the prior mean as the paper does.
- Networks are sent in float32, not compressed.
"""

from collections.abc import Mapping
from itertools import cycle
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from rayfl.compress.dense import Dense
from rayfl.methods.base import (
    BoundTask,
    Collect,
    Context,
    Delivered,
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
from rayfl.methods.shared.neuron_matching import Layer, Prior, merge
from rayfl.task import NetworkTask


class PFNMHyper(LocalWork):
    """Hyper-parameters of PFNM."""

    sigma: float = Field(default=1.0, gt=0, description="standard deviation of local neurons around their global one")
    sigma0: float = Field(default=1.0, gt=0, description="standard deviation of global neurons around the prior mean")
    gamma: float = Field(default=1.0, gt=0, description="mass of the Beta process: larger makes more neurons")
    prior_bias: float = Field(default=0.1, description="prior mean of a neuron's bias, mu0; that of its weights is 0")
    sweeps: int = Field(default=5, ge=0, description="how often every network is matched again")
    estimate: Literal["mean", "posterior"] = Field(default="mean", description="estimate of a global neuron")
    independent_start: bool = Field(default=False, description="every client starts from random weights of its own")


class PFNM(GradientMethod, KeptModel, on_device=True):
    """Client state: its own network. Server: the merged network. Raises ValueError unless the model is an MLP."""

    hyper: PFNMHyper
    paper = "Yurochkin et al., ICML 2019"
    gather = {"model": Collect()}
    own_compression = True

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

    def plan(self, round: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(round),), down=False)

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
