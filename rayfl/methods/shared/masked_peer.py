"""Peers that take one minibatch a round and keep a share of the weights of each layer."""

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Message,
    ModelState,
    PeerHalf,
    Plan,
    State,
    Tree,
    unused_with,
)
from rayfl.methods.shared.distributed_gradient import GradientCarry, OneBatch, OneGradient
from rayfl.methods.shared.local_training import LearningRate


class MaskedPeerHyper(OneBatch, LearningRate):
    """Hyper-parameters of a peer whose round is one minibatch, and of what it keeps of each layer."""

    batch_size: int = Field(default=128, ge=0, description="examples of a round's one batch, b; 0: the whole split")
    retention_ratio: float | None = Field(
        default=None, gt=0, le=1, description="share of a layer kept, r; default: clients.retention_ratio, else 0.5"
    )
    fil: int = Field(
        default=0, ge=0, description="drop filters that keep fewer entries than this, except in the last layer; 0: none"
    )
    fil_share: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="upper bound of fil, as a share of a filter's entries",
        json_schema_extra=unused_with(fil=[0]),
    )


class MaskedPeer(OneGradient, PeerHalf):
    """A peer that trains its `own_model` for one gradient; subclasses use it in `finish`."""

    hyper: MaskedPeerHyper
    capabilities = Capabilities(
        personalized=True,
        own_compression=True,
        hands_over_trees=False,
        honours_retention=True,
        own_retention=("retention_ratio",),
    )

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(self.hyper.rate(round_number)),))

    def begin(self, state: State, received: Message, ctx: Context) -> GradientCarry:
        return self.start(self.own_model(state))

    def trained(self, carry: GradientCarry) -> dict[str, float]:
        """The metrics of a round's training: the batch's loss."""
        return {"train/loss": float(carry["loss"])}

    def eval_begin(self, state: State, model: Tree | None, carry: GradientCarry | None, ctx: Context) -> ModelState:
        return {"params": self.own_model(state)}

    def own_model(self, state: State) -> Tree:
        """The model that a peer trains, and that it is evaluated by."""
        return state["params"]
