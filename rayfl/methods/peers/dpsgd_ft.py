"""D-PSGD-FT: D-PSGD whose peers fine-tune a model before an evaluation; a baseline of Dai et al., DisPFL, ICML 2022.

Training and messages are the same as D-PSGD's, bit for bit; the fine-tuned model is made for an evaluation and then
discarded.

- `ft_from="mean"`: every peer fine-tunes the mean of all peers' models, the consensus model of Dis-PFL's section 4.1
  and appendix B.4, as its code does. No peer knows this mean and nothing is billed for it.
  `own_after_training` fine-tunes the peer's own model even then, since while peers train there is no mean.
- `ft_from="own"`: its own model.
- ft_epochs is by default what a round of local training does, and ft_lr the lr of round 0: lr_decay does not apply.
"""

from typing import Any, Literal

from rayfl.methods.base import BoundTask, Capabilities, Context, Field, HyperParameters, Stage, Tree
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDCarry, DPSGDHyper, DPSGDState
from rayfl.methods.shared.local_training import FineTuning


class DPSGDFTHyper(DPSGDHyper, FineTuning):
    """Hyper-parameters of D-PSGD-FT."""

    ft_from: Literal["own", "mean"] = Field(
        default="mean", description="what is fine-tuned: the mean of all models (which no peer knows), or the own one"
    )


class DPSGDFT(DPSGD):
    """D-PSGD, and the stage before an evaluation."""

    hyper: DPSGDFTHyper
    paper = "Lian et al., NeurIPS 2017, with fine-tuning as in Dai et al., ICML 2022"
    capabilities = Capabilities(on_device=True, keeps_parts=True, newcomer="model", takes_stale=True)

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(task, hyper, **settings)
        self.capabilities = self.capabilities.but(evaluated_from_mean=self.hyper.ft_from == "mean")

    def eval_stages(self, round_number: int) -> tuple[Stage, ...]:
        return (self.hyper.fine_tuning(),)

    def eval_begin(self, state: DPSGDState, model: Tree | None, carry: DPSGDCarry | None, ctx: Context) -> DPSGDCarry:
        params = carry["params"] if carry is not None else state["params"]
        return self.begun_at(params if model is None else model, state)
