"""Sub-FedAvg, unstructured: Vahidian et al., Personalized Federated Learning by Structured and Unstructured Pruning
under Data Heterogeneity, ICDCS Workshops 2021; in Dai et al., Dis-PFL, ICML 2022, as SubFedAvg.

A client gets the entries of its mask, at first all entries, and trains them. From its mask and its weights it makes two
candidate masks, m' after the first epoch and m'' after the last one: each removes the smallest of the kept weights. It
takes m'' as its mask, and prunes, if

- the candidates differ enough: the share of weights in which they differ is above `min_distance`;
- its density is above `target_density`;
- the pruned model is good enough: its accuracy on a validation split is above `min_accuracy`.

It sends the entries of its mask. The server takes the mean of every entry over the clients that keep it, and leaves
entries that no client keeps unchanged.

Where the sources differ or are silent:
- The gate looks at a validation split: the authors' code looks at the test data, Dis-PFL's at the train data.
- Only tensors of two or more dimensions are pruned, each by itself: those with |w| strictly below the quantile of the
  kept ones. Distance and density count the entries of these tensors.
- Entries are counted by the masks that were sent; Dis-PFL's code counts those from before the pruning.
- Every client counts the same, once in each entry that it holds.
- A mask costs bits in the round in which it changes; both ends remember it.
- With one epoch both candidates are the same, and nothing is ever pruned.
"""

from dataclasses import replace

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    Plan,
    Stage,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.accuracy_gate import GATE, GatedCarry, GatedPruning, GateHyper
from rayfl.methods.shared.masked_server import WEIGHTS, MaskedServer, weights_packet

FIRST, REST = "first epoch", "train"


class SubFedAvgHyper(GateHyper):
    """Hyper-parameters of Sub-FedAvg, from its code. Dis-PFL's run has prune_ratio = 0.05."""

    lr: float = Field(default=0.01, gt=0, description="client learning rate")
    batch_size: int = Field(default=10, ge=0, description="examples per batch, b; 0: the whole split")
    default_epochs = 5
    epochs: int | None = Field(default=None, ge=1, description="local epochs per round (left out: 5)")
    min_distance: float = Field(
        default=1e-4, ge=0, description="share of weights by which the two masks of a round must differ"
    )
    min_accuracy: float = Field(default=0.5, ge=0, le=1, description="validation accuracy above which it prunes")

    def unused(self) -> dict[str, str]:
        return {
            **super().unused(),
            "steps": "as Sub-FedAvg decides by the first and last of its epochs",
        }


class SubFedAvgCarry(GatedCarry):
    """A client's carry."""

    early: Tree  # m', after the first epoch
    late: Tree  # m'', after the last one


class SubFedAvg(GatedPruning, MaskedServer):
    """Client: train, make two candidates for the mask, gate. Server: the mean over those that keep an entry."""

    hyper: SubFedAvgHyper
    paper = "Vahidian et al., ICDCSW 2021"
    capabilities = Capabilities(on_device=True)

    def plan(self, round_number: int, coin: float) -> Plan:
        train = self.hyper.stage(round_number)
        assert train.epochs is not None
        stages = [replace(train, name=FIRST, epochs=1)]
        if train.epochs > 1:
            stages.append(replace(train, epochs=train.epochs - 1))
        return Plan(stages=(*stages, self.gate_stage()))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> masks.MaskedModel:
        return {"params": params, "mask": masks.everything(params)}

    def begin(self, state: masks.MaskedModel, received: Message, ctx: Context) -> SubFedAvgCarry:
        mask, carry = state["mask"], self.start(received[WEIGHTS].decode())
        return {**carry, **self.closed_gate(mask, ctx), "early": mask, "late": mask}

    def evaluated_params(self, carry: SubFedAvgCarry) -> Tree:
        """The later candidate."""
        return tree.mul(carry["params"], carry["late"])

    def end_stage(self, carry: SubFedAvgCarry, *, stage: Stage) -> SubFedAvgCarry:
        if stage.name == GATE:
            if not self.prunes(carry):
                return carry
            return {**carry, "mask": carry["late"], "params": masks.masked(carry["params"], carry["late"])}
        candidate = masks.pruned(carry["mask"], carry["params"], self.hyper.prune_ratio)
        return {**carry, "late": candidate, "early": candidate if stage.name == FIRST else carry["early"]}

    def prunes(self, carry: SubFedAvgCarry) -> bool:
        """Whether the client takes its later candidate for its mask."""
        prunable = [name for name, mask in carry["mask"].items() if mask.dim() > 1]
        size = max(1, sum(carry["mask"][name].numel() for name in prunable))
        alive = sum(int(carry["mask"][name].sum()) for name in prunable)
        differ = sum(int((carry["early"][name] != carry["late"][name]).sum()) for name in prunable)
        return self.passes(carry) and differ / size > self.hyper.min_distance and alive / size > float(carry["target"])

    def finish(self, state: masks.MaskedModel, carry: SubFedAvgCarry, ctx: Context) -> Finished:
        params, mask = carry["params"], carry["mask"]
        metrics = self.train_loss(carry, ctx, FIRST, REST)
        message = {WEIGHTS: weights_packet(params, mask, state["mask"])}
        return Finished({"params": params, "mask": mask}, message, 1.0, metrics)
