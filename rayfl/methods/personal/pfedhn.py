"""pFedHN: Shamsian, Navon, Fetaya, Chechik, Personalized Federated Learning using Hypernetworks, ICML 2021, Algorithm
1.

The server has no model, but a hypernetwork h that makes one for each client from a vector v_i: theta_i = h(v_i; phi).
Client i trains from theta_i and sends delta_i = theta_i - trained; the server takes a step of SGD along

(d theta_i / d phi)^T delta_i for phi,   (d theta_i / d v_i)^T delta_i for v_i,

with the derivatives at the values that made theta_i. phi and the v_i never leave it, so a large h costs no
communication.

- The paper has one client a round. Of several, phi takes the mean of their directions, and each v_i its own.
- h is a perceptron with `hidden_layers` layers of `hidden` units and relu, and for each tensor of the model a linear
  layer on top: about hidden + 1 times as many parameters as the model. Its layers begin as torch's do, and v_i is drawn
  from a normal distribution.
- The server's SGD has momentum and weight decay, and `server_clip` bounds the norm of its whole direction. v_i, and
  what momentum remembers of it, move only when client i has delivered. The authors' code decays all v_i in every round.
- Defaults are the authors': 50 steps of rate 0.005 with momentum 0.9 and weight decay 5e-5; at the server rate 0.01,
  momentum 0.9, weight decay 1e-3, a bound of 50, 3 layers of 100 units. Their v_i have 1 + N / 4 numbers for N clients;
  here 8 unless `embedding_dim` says otherwise.
- One plain full-batch step is SGD on f_i(h(v_i; phi)) at the rate lr times server_lr.
- The server keeps all deltas of a round, and its state goes to all actors, which make the clients' models: both are as
  large as m and `hidden` times the model.
- `own/...` evaluates theta_i. There is no global model, and a client that comes for the first time has no v_i.
- pFedHN-PC, in which clients keep their heads, is not built.
"""

from typing import TypedDict

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Collect,
    Context,
    Field,
    Finished,
    FirstDraws,
    ModelState,
    Received,
    Reply,
    ServerHalf,
    State,
    Tree,
    tree,
)
from rayfl.methods.hook_types import encode_broadcast
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork, clip
from rayfl.methods.shared.modules_beside import apply_linear, linear
from rayfl.methods.shared.optimizers import SGD
from rayfl.task import inner

HYPERNETWORK, EMBEDDING = "hypernetwork ", "embedding "
"""The beginnings of the names of phi and of the v_i, before the number of the client."""
NO_BATCH = Batch(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
"""For gradients of functions of phi alone."""


class PFedHNHyper(LocalWork):
    """Hyper-parameters of pFedHN; those of local training are the clients'."""

    default_steps = 50
    lr: float = Field(default=0.005, gt=0, description="client learning rate, eta_l")
    steps: int | None = Field(default=None, ge=1, description="local steps per round, K (50 where epochs is not given)")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of the clients' SGD")
    weight_decay: float = Field(default=5e-5, ge=0, description="L2 penalty added to the clients' gradient")
    embedding_dim: int = Field(default=8, ge=1, description="numbers of a client's vector v_i")
    hidden: int = Field(default=100, ge=1, description="units of a layer of the hypernetwork")
    hidden_layers: int = Field(default=3, ge=1, description="layers of the hypernetwork before those that make tensors")
    server_lr: float = Field(default=0.01, gt=0, description="learning rate of the server, alpha")
    server_momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of the server's SGD")
    server_weight_decay: float = Field(default=1e-3, ge=0, description="L2 penalty added to the server's direction")
    server_clip: float = Field(default=50.0, ge=0, description="largest norm of the server's direction; 0: no bound")


class PFedHNServer(TypedDict):
    """Server state."""

    moving: Tree  # phi, and the v_i of the clients that have delivered
    optimizer: State


class PFedHN(GradientMethod, ServerHalf):
    """Down: theta_i. Up: delta_i. Clients keep nothing."""

    hyper: PFedHNHyper
    paper = "Shamsian et al., ICML 2021"
    capabilities = Capabilities(
        on_device=True, personalized=True, has_global_model=False, newcomer="undefined", delta_of_network=False
    )
    gather = {"delta": Collect()}

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        hyper, generator = self.hyper, draws.common("hypernetwork")
        phi: Tree = {}
        for number in range(hyper.hidden_layers):
            width = hyper.hidden if number else hyper.embedding_dim
            phi |= linear(f"{HYPERNETWORK}{number}", hyper.hidden, width, generator)
        for name, tensor in params.items():
            phi |= linear(f"{HYPERNETWORK}of {name}", tensor.numel(), hyper.hidden, generator)
        return {**params, **phi}

    def generated(self, moving: Tree, embedding: torch.Tensor, like: Tree) -> Tree:
        """theta = h(v; phi), in the shapes of the network's tensors in `like`."""
        units = embedding
        for number in range(self.hyper.hidden_layers):
            units = apply_linear(moving, f"{HYPERNETWORK}{number}", units).relu()
        return {
            name: apply_linear(moving, f"{HYPERNETWORK}of {name}", units).view(tensor.shape)
            for name, tensor in like.items()
            if not name.startswith(HYPERNETWORK)
        }

    def embedding(self, moving: Tree, client: int, seed: int) -> torch.Tensor:
        """v_i; the first one of a client that has delivered nothing yet."""
        if (name := f"{EMBEDDING}{client}") in moving:
            return moving[name]
        first = FirstDraws(seed, client).own.standard_normal(self.hyper.embedding_dim)
        return torch.from_numpy(first).to(moving[f"{HYPERNETWORK}0.weight"])

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        return Finished(state, {"delta": self.delta(carry)}, metrics=self.train_loss(carry, ctx))

    def init_server(self, params: Tree) -> PFedHNServer:
        return {
            "moving": {name: tensor for name, tensor in params.items() if name.startswith(HYPERNETWORK)},
            "optimizer": {},
        }

    def model(self, server: PFedHNServer) -> Tree:
        return server["moving"]

    def personal_message(self, server: PFedHNServer, server_memory: State, ctx: Context) -> Reply:
        embedding = self.embedding(server["moving"], ctx.traits.id, ctx.seed)
        theta = self.generated(server["moving"], embedding, ctx.initial)
        return Reply(encode_broadcast({"model": theta}, ctx), server_memory)

    def update(self, server: PFedHNServer, received: Received, ctx: Context) -> PFedHNServer:
        moving, items = server["moving"], received["delta"].items
        phi = {name: tensor for name, tensor in moving.items() if name.startswith(HYPERNETWORK)}
        total, vectors, directions = tree.zeros_like(phi), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for client in sorted(items):
            delta, name = items[client], f"{EMBEDDING}{client}"
            assert isinstance(delta, dict), "Collect decodes"

            def objective(both: Tree, batch: Batch, delta: Tree = delta, name: str = name) -> torch.Tensor:
                return inner(self.generated(both, both[name], delta), delta)

            vectors[name] = self.embedding(moving, client, ctx.seed)
            gradient = self.task.grad({**phi, name: vectors[name]}, NO_BATCH, objective)
            directions[name] = gradient.pop(name)
            total = tree.add(total, gradient)
        direction = clip({**tree.scale(total, 1 / len(items)), **directions}, self.hyper.server_clip or None)
        optimizer = SGD(momentum=self.hyper.server_momentum, weight_decay=self.hyper.server_weight_decay)
        params, old = {**phi, **vectors}, server["optimizer"].get("velocity", {})
        state = optimizer.init(params)
        if "velocity" in state:
            state = {"velocity": {**state["velocity"], **{name: old[name] for name in params if name in old}}}
        params, state = optimizer.update(params, direction, state, self.hyper.server_lr)
        velocity = {"velocity": {**old, **state["velocity"]}} if "velocity" in state else {}
        return {"moving": {**moving, **params}, "optimizer": velocity}

    def eval_begin(self, state: State, model: Tree | None, carry: LocalCarry | None, ctx: Context) -> ModelState:
        if carry is not None:
            return {"params": carry["params"]}
        moving = model or {}
        return {"params": self.generated(moving, self.embedding(moving, ctx.traits.id, ctx.seed), ctx.initial)}
