"""IFCA: Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated Learning, NeurIPS 2020,
Algorithm 1.

The server has k models x^1, ..., x^k. A client downloads all of them, chooses j_i = argmin_j f_i(x^j) on its train
split (the lowest number if several are equal), and trains x^{j_i}. Up: delta_i, and j_i in 1 byte (none if k = 1).
Server: x^j <- x^j - sum_{j_i = j} w_i delta_i / sum_{j_i = j} w_i, with w_i by examples or uniform.

- This is the paper's model averaging. Its gradient averaging (`averaging="gradient"`) divides by the weights of all who
  delivered, so that a small cluster moves less; the paper's clients then take one step on all examples (`steps=1`,
  `batch_size=0`). The paper's variant with shared layers below k heads is not implemented.
- Models that start equal stay equal, so each starts from its own draw: x^1 is the experiment's initial model, and the
  others are drawn in the same way. So `model.start` is refused. Adapters start at 0: if nothing else is trained, all
  models start equal, and every client chooses the first one.
- The choice is made in evaluation mode, and costs k forward passes over the train split; a slow client of
  `clients.work` sees a share of it.
- A client, also an unseen one, is evaluated on its test split with the model that it chooses on its train split. The
  authors' code chooses by the test loss, which is a leak. No model is global, so nothing is `pooled`.
- A model that no client chose, or for which nothing arrived, does not change. Clients keep no state, so a client that
  was absent, or whose upload was lost, chooses again.
- Recorded for every client: `ifca/cluster`, j_i counted from 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from rayfl.compress.scalar import CountCodec
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Gather,
    Message,
    ModelServer,
    ModelState,
    Packet,
    Plan,
    Received,
    Stage,
    State,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalTraining


class IFCAHyper(LocalTraining):
    """Hyper-parameters of IFCA."""

    num_clusters: int = Field(default=2, ge=1, le=256, description="models of the server, k")
    averaging: Literal["model", "gradient"] = Field(
        default="model",
        description="divide a cluster's sum of deltas by the weights of its clients (model) or of all (gradient)",
    )


class IFCACarry(LocalCarry):
    """A client's carry."""

    models: dict[str, Tree]  # x^1, ..., x^k, until one is chosen
    losses: torch.Tensor  # of these models, summed over the train examples, float64 [k]
    cluster: torch.Tensor  # j_i once it is chosen, int64 [1]


class IFCA(GradientMethod, ModelServer):
    """Down: the k models. Up: the delta of the chosen one, under a name of its own, and the choice."""

    hyper: IFCAHyper
    paper = "Ghosh et al., NeurIPS 2020"
    capabilities = Capabilities(on_device=True, has_global_model=False, may_be_silent=True)

    @property
    def gather(self) -> Mapping[str, Gather]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {f"delta {cluster}": WeightedMean() for cluster in range(self.hyper.num_clusters)}

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(*self.eval_stages(round_number), self.hyper.stage(round_number)))

    def eval_stages(self, round_number: int) -> tuple[Stage, ...]:
        # The batch size limits the memory; it does not change the losses' sum except by rounding.
        return (Stage("choose", epochs=1, batch_size=1000),)

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return 1.0 if stage.name == "train" else self.hyper.num_clusters / 3

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        # The parameters are copied, so that a model whose weights come from a file is refused as changed.
        first = {name: tensor.clone() for name, tensor in of_cluster(params, 0).items()}
        seeds = draws.common("models of clusters").integers(2**63, size=self.hyper.num_clusters - 1).tolist()
        return first | {
            named(name, cluster): weights[name]
            for cluster, weights in enumerate(map(self.task.init, seeds), 1)
            for name in first
        }

    def begin(self, state: State, received: Message, ctx: Context) -> IFCACarry:
        return self.eval_begin(state, received["model"].decode(), None, ctx)

    def eval_begin(self, state: State, model: Tree | None, carry: IFCACarry | None, ctx: Context) -> IFCACarry:
        params = (model or {}) if carry is None else carry["params"]
        models = {str(j): of_cluster(params, j) for j in range(len(params) // len(of_cluster(params, 0)))}
        return {
            **self.start(models["0"]),
            "models": models,
            "losses": torch.zeros(len(models), dtype=torch.float64),
            "cluster": torch.zeros(1, dtype=torch.int64),
        }

    def step(self, carry: IFCACarry, batch: Batch, *, stage: Stage) -> IFCACarry:
        if stage.name == "train":
            return super().step(carry, batch, stage=stage)
        losses = torch.stack([self.task.losses(params, batch)[0].double() for params in carry["models"].values()])
        return {**carry, "losses": carry["losses"] + batch.without_padding(losses).sum(dim=1)}

    def end_stage(self, carry: IFCACarry, *, stage: Stage) -> IFCACarry:
        if stage.name == "train":
            return carry
        # The choice stays a tensor, as reading it would wait for the GPU. A model that has diverged is chosen last.
        cluster = carry["losses"].nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(dim=0, keepdim=True)
        params = {
            name: torch.stack([model[name] for model in carry["models"].values()])[cluster][0]
            for name in carry["params"]
        }
        return {**carry, "params": params, "received": params, "cluster": cluster, "models": {}}

    def finish(self, state: State, carry: IFCACarry, ctx: Context) -> Finished:
        # With one model there is no choice to send.
        cluster, choice = int(carry["cluster"]), carry["cluster"].cpu().byte().numpy()[: self.hyper.num_clusters - 1]
        message = {
            f"delta {cluster}": self.delta(carry),
            "cluster": Packet({"cluster": choice}, CountCodec((("cluster", ()),))),
        }
        finished = self.finished(state, message, carry, ctx, "train")
        return replace(finished, metrics={**finished.metrics, "ifca/cluster": cluster})

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        by_cluster = {cluster: received[name] for cluster, name in enumerate(self.gather) if received[name].count}
        params, total = dict(server["params"]), sum(gathered.weight for gathered in by_cluster.values())
        for cluster, gathered in by_cluster.items():
            x, mean = of_cluster(params, cluster), self.hyper.averaging == "model"
            moved = gathered.taken_from(x) if mean else tree.add(x, gathered.result, -gathered.weight / total)
            params |= {named(name, cluster): tensor for name, tensor in moved.items()}
        return {"params": params}


def named(name: str, cluster: int) -> str:
    """The name of a parameter of a cluster's model among those of all; the first model has the plain names."""
    return f"cluster {cluster}/{name}" if cluster else name


def of_cluster(params: Tree, cluster: int) -> Tree:
    """The model of a cluster, by plain names, among those of all."""
    return {name: params[named(name, cluster)] for name in params if not name.startswith("cluster ")}
