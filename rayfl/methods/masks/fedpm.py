"""FedPM: Isik, Pase, Gunduz, Weissman, Zorzi, Sparse Random Networks for Communication-Efficient Federated Learning,
ICLR 2023, Algorithms 1 and 2.

All have the same random weights w, which never change and are never sent: each is c or -c, c = e / sqrt(fan-in). A
probability theta says how likely an entry is kept. A client gets theta and trains the scores s = logit(theta):

    m ~ Bernoulli(theta), drawn anew in every step                 the network w o m sees a minibatch
    ds = (df/dm) theta (1 - theta)                                 the derivative of the draw is taken as 1
    after the last step: m_i ~ Bernoulli(sigmoid(s)), which is sent

The server has a Beta distribution of every entry, alpha = beta = lambda0 at first:

    alpha <- alpha + sum_i m_i,  beta <- beta + m - sum_i m_i,  theta <- (alpha - 1) / (alpha + beta - 2)

Where paper and code differ or leave something open:
- The distribution is reset to lambda0 every ceil(1 / participation) rounds, as the paper says; the code resets it every
  round (`reset_rounds=1`). With lambda0 = 1, theta is the mean of all masks since then.
- A theta of 0 or 1 could never learn again, so theta stays within `clip` of them. The code clips the uploaded masks.
- `straight_through="theta"` is the code's backward pass, which has a further factor theta.
- Biases of masked layers are masked too, with their layer's fan-in. Other tensors of one dimension (norms) keep their
  initial values and are not sent; embeddings are layers.
- theta starts at sigmoid(N(0, 1)). The initial parameters are w o theta, which tells both to all.
- A tensor's mask is sent as bits, or in a Golomb-Rice code of the rarer value, which is within 4% of the entropy; the
  uplink bits are those of the buffer. comm/link_megabytes is the paper's bill, the entropy of the mask's share of ones.
- The global model that is evaluated and saved is w o m with one mask drawn from theta in each round
  (`evaluated="sample"`), w o [theta > 1/2] ("threshold"), or w o theta ("mean").
- A client's mask counts the same whatever its number of examples.
"""

import math
from typing import Literal

import torch

from rayfl.compress.masks import coded_mask_packet
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Delivered,
    Download,
    Field,
    Finished,
    FirstDraws,
    KeptModel,
    Message,
    Metrics,
    ModelState,
    RayflError,
    Received,
    Stage,
    State,
    Sum,
    Tree,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork
from rayfl.methods.shared.optimizers import OptimizerName
from rayfl.methods.shared.step_draws import first_key, next_key, uniforms

MASK = "mask"


class FedPMHyper(LocalWork):
    """Hyper-parameters of FedPM, with the values of its code."""

    lr: float = Field(default=0.01, gt=0, description="learning rate of the scores")
    default_epochs = 3
    epochs: int | None = Field(default=None, ge=1, description="local epochs per round (3 where steps is not given)")
    batch_size: int = Field(default=128, ge=0, description="examples per batch, b; 0: the whole split")
    optimizer: OptimizerName = Field(default="adam", description="client optimizer of the scores, reset every round")
    prior: float = Field(default=1.0, ge=1, description="alpha and beta after a reset, lambda0")
    reset_rounds: int | None = Field(
        default=None, ge=1, description="rounds between resets of alpha and beta (left out: ceil(1 / participation))"
    )
    clip: float = Field(default=0.01, gt=0, lt=0.5, description="theta stays in [clip, 1 - clip]")
    straight_through: Literal["identity", "theta"] = Field(
        default="identity", description="derivative of a mask with respect to theta: 1, or theta as in the code"
    )
    evaluated: Literal["sample", "threshold", "mean"] = Field(
        default="sample", description="mask of the evaluated model: drawn from theta, theta > 1/2, or theta itself"
    )


class FedPMServer(ModelState):
    """The server's state; "params" is the network that is evaluated."""

    theta: Tree
    ones: Tree  # the sum of the masks since the last reset
    count: torch.Tensor  # the number of these masks


class FedPMCarry(LocalCarry):
    """A client's carry; "params" are the scores."""

    weights: Tree  # w
    rest: Tree  # what is not masked
    key: torch.Tensor  # of the draws of the next step


class FedPM(GradientMethod, KeptModel):
    """Clients learn the probabilities of masks on random weights, and send one mask each."""

    hyper: FedPMHyper
    paper = "Isik et al., ICLR 2023"
    capabilities = Capabilities(on_device=True, own_compression=True)
    gather = {MASK: Sum()}

    def check_model(self, params: Tree) -> None:
        if not magnitudes(params):
            raise RayflError("FedPM masks weights of two or more dimensions, and the model has none")

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        generator = draws.common("common weights")

        def drawn(tensor: torch.Tensor, magnitude: float) -> torch.Tensor:
            theta = 1 / (1 + torch.exp(-torch.from_numpy(generator.standard_normal(tuple(tensor.shape)))))
            signs = torch.from_numpy(generator.choice([-1.0, 1.0], tuple(tensor.shape)))
            return (magnitude * signs * self.clipped(theta)).to(torch.float32)

        return {**params, **{name: drawn(params[name], c) for name, c in magnitudes(params).items()}}

    def init_server(self, params: Tree) -> FedPMServer:
        theta = {name: self.clipped(params[name].abs() / c) for name, c in magnitudes(params).items()}
        return {"params": params, "theta": theta, "ones": tree.zeros_like(theta), "count": torch.zeros(())}

    def download(self, server: FedPMServer, ctx: Context) -> Download:
        return {"theta": server["theta"]}

    def begin(self, state: State, received: Message, ctx: Context) -> FedPMCarry:
        theta = {name: self.clipped(tensor) for name, tensor in received["theta"].decode().items()}
        weights = fixed_weights(ctx.initial)
        rest = {name: tensor for name, tensor in ctx.initial.items() if name not in weights}
        start = self.start(tree.map(torch.logit, theta))
        return {**start, "weights": weights, "rest": rest, "key": first_key(ctx.generator)}

    def step(self, carry: FedPMCarry, batch: Batch, *, stage: Stage) -> FedPMCarry:
        theta, weights = tree.map(torch.sigmoid, carry["params"]), carry["weights"]
        network = tree.mul(weights, _ones_of(theta, carry["key"]))
        loss, gradient = self.task.value_and_grad({**carry["rest"], **network}, batch)
        along: Tree = {}
        for name, kept in theta.items():
            along[name] = gradient[name] * weights[name] * kept * (1 - kept)
            if self.hyper.straight_through == "theta":
                along[name] = along[name] * kept
        return {**self.descend(carry, loss, along, stage), "key": next_key(carry["key"])}

    def finish(self, state: State, carry: FedPMCarry, ctx: Context) -> Finished:
        mask = _ones_of(tree.map(torch.sigmoid, carry["params"]), carry["key"])
        num_entries = tree.num_entries(mask)
        share = sum(int(tensor.sum()) for tensor in mask.values()) / num_entries
        bill = {"fedpm/ones": share, "comm/link_megabytes": binary_entropy(share) * num_entries / 8e6}
        message = {MASK: coded_mask_packet(tree.map(lambda kept: kept > 0, mask))}
        return Finished(state, message, 1.0, {**self.train_loss(carry, ctx), **bill})

    def server_update(
        self, server: FedPMServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[FedPMServer, Metrics]:
        hyper, theta, ones, count = self.hyper, server["theta"], server["ones"], server["count"]
        period = hyper.reset_rounds or math.ceil(ctx.num_clients / max(1, ctx.num_selected))
        if ctx.round % period == 0:
            ones, count = tree.zeros_like(ones), torch.zeros(())
        masks = received[MASK]
        if masks.count:
            ones, count = tree.add(ones, masks.result), count + masks.count
            surplus = hyper.prior - 1
            theta = tree.map(lambda total: self.clipped((surplus + total) / (2 * surplus + count)), ones)
        network = self.network(theta, ctx)
        return {"params": network, "theta": theta, "ones": ones, "count": count}, {}

    def eval_begin(self, state: State, model: Tree | None, carry: FedPMCarry | None, ctx: Context) -> ModelState:
        if carry is None:
            return super().eval_begin(state, model, carry, ctx)
        return {"params": self.network(tree.map(torch.sigmoid, carry["params"]), ctx)}

    def network(self, theta: Tree, ctx: Context) -> Tree:
        """The model of `theta` that is evaluated; a mask is drawn from the context's generator."""
        if self.hyper.evaluated == "sample":
            mask = _ones_of(theta, first_key(ctx.generator).to(next(iter(theta.values())).device))
        else:
            mask = theta if self.hyper.evaluated == "mean" else tree.map(lambda kept: (kept > 0.5).float(), theta)
        weights = fixed_weights(ctx.initial)
        return {name: weights[name] * mask[name] if name in mask else t for name, t in ctx.initial.items()}

    def clipped(self, theta: torch.Tensor) -> torch.Tensor:
        """`theta` within `clip` of 0 and 1."""
        return theta.clamp(self.hyper.clip, 1 - self.hyper.clip)


def magnitudes(params: Tree) -> dict[str, float]:
    """c = e / sqrt(fan-in) of every masked tensor: those of two or more dimensions, and their biases."""
    layers = {name: math.e / math.sqrt(t[0].numel()) for name, t in params.items() if t.dim() > 1}
    # A bias has the name of its weight: fc.bias, in_proj_bias, bias_ih_l0.
    names = {name: (head + last.replace("bias", "weight")) for name in params for head, last in [_split(name)]}
    return {name: layers[names[name]] for name in params if names[name] in layers}


def fixed_weights(initial: Tree) -> Tree:
    """w, from the parameters of round 0, which have its signs."""
    return {name: torch.where(initial[name] < 0, -c, c) for name, c in magnitudes(initial).items()}


def binary_entropy(share: float) -> float:
    """Bits of a draw that is 1 with probability `share`."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def _split(name: str) -> tuple[str, str]:
    """The name of a module with a dot, and the name of a parameter in it."""
    head, dot, last = name.rpartition(".")
    return head + dot, last


def _ones_of(theta: Tree, key: torch.Tensor) -> Tree:
    """A mask drawn from theta, as 1.0 and 0.0."""
    drawn = uniforms(key, theta)
    return {name: (drawn[name] < kept).to(kept.dtype) for name, kept in theta.items()}
