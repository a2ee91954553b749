"""FedAvg-FT: FedAvg whose clients fine-tune the global model before an evaluation, as among the
baselines of Dai et al., Dis-PFL, ICML 2022.

The personal model of client i is the global x after E_ft epochs of local training. It is made for an evaluation and
then discarded: training and messages are the same as FedAvg's, bit for bit.

- By default fine-tuning does as much work as a round of local training, at the constant rate ft_lr without decay.
- `own_after_training` fine-tunes the x that the client had received, not the model of its round, which would be tuned
  twice.
- `pooled` is the global model as it is.
"""

from rayfl.methods.base import Capabilities, Context, Stage, State, Tree
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import FineTuning, LocalCarry, LocalTraining


class FedAvgFTHyper(LocalTraining, FineTuning):
    """Hyper-parameters of FedAvg-FT."""


class FedAvgFT(FedAvg):
    """FedAvg, and the stage before an evaluation."""

    hyper: FedAvgFTHyper
    paper = "McMahan et al., AISTATS 2017, with fine-tuning as in Dai et al., ICML 2022"
    capabilities = Capabilities(on_device=True, server_on_device=True, keeps_parts=True, takes_stale=True)

    def eval_stages(self, round_number: int) -> tuple[Stage, ...]:
        return (self.hyper.fine_tuning(),)

    def eval_begin(self, state: State, model: Tree | None, carry: LocalCarry | None, ctx: Context) -> LocalCarry:
        params = model if carry is None else carry["received"]
        assert params is not None, "FedAvg-FT has a global model to fine-tune"
        return self.start(params)
