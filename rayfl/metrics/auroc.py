"""The area under the ROC curve, from histograms of the logits."""

import torch

from rayfl.metrics.base import Facts, Field, Metric, MetricSums, MetricValues
from rayfl.metrics.targets import are_labels, flat

RANGE = 16.0
"""Logits are clipped to +-RANGE; a probability of 1e-7 lies beyond."""


class Auroc(Metric):
    """The probability that a random example of a class gets a larger logit for it than one of another class (AUROC).

    One class against the rest, as the mean over classes (or labels) that have examples on both sides; undefined if none
    has. The logit of a class is its log-odds, log(p / (1 - p)), clipped to +-16, in bins of equal width (bins of
    probabilities would be crowded at 1). `auroc_error` is the largest error that the bins can cause: half the share of
    pairs that lie in one bin. The AUROC is exact if no bin holds both sides.
    """

    name = "auroc"
    title = "AUROC"
    bounds = (0.0, 1.0)
    higher_is_better = True
    takes_targets = ("classes", "labels")
    # A client's sums have 2 * classes * bins numbers.
    most_classes = 100

    bins: int = Field(default=4096, ge=2, le=1 << 16, description="number of bins of the logits")

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> MetricSums:
        if are_labels(outputs, targets):
            odds = outputs.double()
            positive = targets > 0
        else:
            outputs, targets = flat(outputs, targets)
            odds = log_odds(outputs.double())
            positive = torch.nn.functional.one_hot(targets, outputs.shape[-1]).bool()
        size = odds.shape[-1]
        bin_index = ((odds.nan_to_num(-RANGE).clamp(-RANGE, RANGE) + RANGE) * (self.bins / (2 * RANGE))).long()
        bin_index = bin_index.clamp(max=self.bins - 1) + self.bins * torch.arange(size, device=bin_index.device)
        sides = {"positive": bin_index[positive], "negative": bin_index[~positive]}
        return {
            name: torch.bincount(indices, minlength=size * self.bins).reshape(size, self.bins)
            for name, indices in sides.items()
        }

    def value(self, sums: MetricSums) -> MetricValues:
        positive, negative = sums["positive"].double(), sums["negative"].double()
        pairs = positive.sum(dim=1) * negative.sum(dim=1)
        if not bool((pairs > 0).any()):
            return {self.name: None, f"{self.name}_error": None}
        above = positive.sum(dim=1, keepdim=True) - positive.cumsum(dim=1)
        ordered = (negative * above).sum(dim=1)
        shared = (negative * positive).sum(dim=1) / 2
        areas, errors = ((part / pairs)[pairs > 0] for part in (ordered + shared, shared))
        return {self.name: float(areas.mean()), f"{self.name}_error": float(errors.mean())}

    def facts(self, name: str) -> Facts:
        error = {
            "title": "Error of AUROC",
            "meaning": "The most by which bins can change the AUROC",
            "higher_is_better": False,
            "ranks": False,
        }
        return super().facts(name).model_copy(update={} if name == self.name else error)


def log_odds(logits: torch.Tensor) -> torch.Tensor:
    """log(p_c / (1 - p_c)) of each class c, [m, classes]: its logit minus the log-sum-exp of the others'."""
    log_p = logits.log_softmax(dim=-1)
    # log(1 - p) from the others' logits, because 1 - p is 0 in floating point where p is close to 1.
    largest = log_p.exp().argmax(dim=-1, keepdim=True)
    rest = torch.log1p(-log_p.exp().scatter(-1, largest, 0.0))
    return log_p - rest.scatter(-1, largest, log_p.scatter(-1, largest, -torch.inf).logsumexp(dim=-1, keepdim=True))
