"""Expected calibration error: how far a model's confidence is from its accuracy (Guo et al., ICML 2017)."""

import torch

from rayfl.metrics.base import Field, Metric, MetricSums, MetricValues, ratio
from rayfl.metrics.targets import are_labels, flat


class CalibrationError(Metric):
    """The distance between confidence and accuracy, as the mean over bins of equal confidence (ECE). 0 is calibrated.

    The confidence of an answer is the largest probability; for a yes-or-no label it is max(p, 1 - p). Bin b of B holds
    confidences in (b / B, (b + 1) / B], and the first one also 0. The error of all clients' outputs together is at most
    the mean of their own errors weighted by examples. Parts: the examples, the mean confidence and the accuracy of each
    bin, which the report draws.
    """

    name = "ece"
    title = "Calibration error"
    unit = "%"
    bounds = (0.0, 1.0)
    higher_is_better = False
    drawn = "calibration"
    takes_targets = ("classes", "labels")

    bins: int = Field(default=15, ge=1, le=1000, description="number of bins of equal width")

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> MetricSums:
        if are_labels(outputs, targets):
            yes = outputs.double().flatten().sigmoid()
            confidence = torch.maximum(yes, 1 - yes)
            right = (outputs > 0).flatten() == (targets > 0).flatten()
        else:
            outputs, targets = flat(outputs, targets)
            confidence = outputs.double().softmax(dim=-1).amax(dim=-1)
            right = outputs.argmax(dim=-1) == targets
        # A model that has diverged has confidence NaN; its examples go into the first bin, and the sums become NaN.
        bin_index = ((confidence * self.bins).ceil() - 1).nan_to_num(0.0).clamp(0, self.bins - 1).long()
        return {
            "count": torch.bincount(bin_index, minlength=self.bins),
            "right": torch.bincount(bin_index[right], minlength=self.bins),
            "confidence": torch.zeros(self.bins, dtype=torch.float64, device=bin_index.device).index_add_(
                0, bin_index, confidence
            ),
        }

    def value(self, sums: MetricSums) -> MetricValues:
        count, right, confidence = (sums[name].double() for name in ("count", "right", "confidence"))
        rows = enumerate(zip(count.tolist(), right.tolist(), confidence.tolist(), strict=True))
        bins = {
            f"{self.name}/{index}/{part}": value
            for index, (n, hits, sure) in rows
            for part, value in (("examples", n), ("confidence", ratio(sure, n)), ("accuracy", ratio(hits, n)))
        }
        return {self.name: ratio(float((right - confidence).abs().sum()), float(count.sum())), **bins}
