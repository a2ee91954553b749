"""The sums of a run's metrics over the outputs of one model on some examples.

Metrics of single examples (`PerExample`) are kept per example, and the sums of a client's own split are sums over its
examples. Of other metrics the sums are kept, and the outputs if clients' splits are to be measured later.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rayfl.data.batches import Batch
from rayfl.data.transfer import to_device
from rayfl.metrics.base import MetricSums, PerExample, are_finite
from rayfl.metrics.loss import Loss
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import EvaluatedSplit, PooledJob, SplitSums
from rayfl.task import NetworkTask
from rayfl.tree import ArrayTree, Tree

BATCH = 1000
"""Number of examples evaluated at once."""


class ModelSums(NamedTuple):
    """A model's metric sums, and what is needed to make those of a part of the examples.

    rows: for each `PerExample` metric, by its index, the sum and count of each example, float64 [2, n]. others: the
    sums of the other metrics. For clients' own splits of the pooled test set there are the outputs, float32 [n, ...],
    or, if all outputs are too large to be kept, the sums by client.
    """

    rows: Mapping[int, np.ndarray]
    others: SplitSums
    outputs: np.ndarray | None = None
    by_client: Mapping[int, SplitSums] | None = None

    @property
    def total(self) -> SplitSums:
        """The sums over all examples."""
        return SplitSums(
            self.others.num_examples,
            {**{index: _of_rows(rows) for index, rows in self.rows.items()}, **self.others.sums},
        )


MOST_OUTPUT_BYTES = 256 << 20
"""If a metric needs outputs to measure clients' own splits, the outputs of the pooled test set are kept during an
evaluation up to this size (float32). If they are larger, each batch is measured for each client that owns a part of it.
"""


def pooled_sums(setup: Setup, params: Tree, job: PooledJob) -> ModelSums:
    """The metric sums of the global model `params` on the examples of `job`."""
    if job.split == "train":
        return model_sums(setup, params, "train", setup.evaluated_rows[job.first : job.last])
    needs_outputs = job.by_client and not all(isinstance(metric, PerExample) for metric in setup.metrics)
    sums = model_sums(setup, params, "test", np.arange(job.first, job.last), needs_outputs)
    return sums if sums.outputs is None or outputs_fit(setup) else cut_up(setup, sums, job.first)


def outputs_fit(setup: Setup) -> bool:
    """Whether the outputs of the pooled test set are kept for an evaluation, if they are needed."""
    task = setup.method.task
    if not isinstance(task, NetworkTask):
        return True
    shape = task.task.output_shape(setup.dataset)
    # The size of one of several outputs is not known.
    return shape is not None and 4 * len(setup.dataset.test) * math.prod(shape) <= MOST_OUTPUT_BYTES


def model_sums(
    setup: Setup, params: Tree, split: EvaluatedSplit, indices: np.ndarray, keep_outputs: bool = False
) -> ModelSums:
    """The metric sums of the model `params` on the examples `indices` of a split, batch by batch."""
    params = to_device(params, setup.device)
    with torch.no_grad():
        return joined([_of_batch(setup, params, batch, keep_outputs) for batch in batches(setup, split, indices)])


def mean_loss(setup: Setup, params: Tree, indices: np.ndarray) -> float:
    """The task's mean loss of the model `params` on the train examples `indices`, of which there is at least one."""
    params = to_device(params, setup.device)
    task = setup.method.task
    parts = [torch.stack(task.losses(params, batch)).double().sum(1) for batch in batches(setup, "train", indices)]
    total, count = torch.stack(parts).sum(0).tolist()
    return total / count


def batches(setup: Setup, split: EvaluatedSplit, indices: np.ndarray) -> Iterator[Batch]:
    """The examples `indices` of a split, in batches for evaluation."""
    held = setup.device_data.split(split)
    for rows in held.order(indices).split(BATCH):
        inputs, labels = held.take(rows)
        yield Batch(setup.device_data.normalise(inputs), labels)


def _of_batch(setup: Setup, params: Tree, batch: Batch, keep_outputs: bool) -> ModelSums:
    task = setup.method.task
    if not isinstance(task, NetworkTask):
        rows = torch.stack(task.losses(params, batch)).double().cpu().numpy()
        return ModelSums({0: rows}, SplitSums(len(batch.labels), {}))
    outputs = checked_hook(setup.method.outputs)(params, batch)
    predictions = task.predictions(outputs, setup.metrics)
    rows, sums = dict[int, np.ndarray](), dict[int, ArrayTree]()
    for index, metric in enumerate(setup.metrics):
        if isinstance(metric, PerExample):
            each = metric.each(outputs if isinstance(metric, Loss) else predictions, batch.labels)
            rows[index] = torch.stack([row.double() for row in each]).cpu().numpy()
        else:
            sums[index] = as_arrays(metric.measure(predictions, batch.labels))
    return ModelSums(
        rows, SplitSums(len(batch.labels), sums), predictions.float().cpu().numpy() if keep_outputs else None
    )


def joined(parts: Sequence[ModelSums]) -> ModelSums:
    """The sums of all parts, in their order."""
    outputs = [part.outputs for part in parts if part.outputs is not None]
    by_client: dict[int, list[SplitSums]] = {}
    for part in parts:
        for client, sums in (part.by_client or {}).items():
            by_client.setdefault(client, []).append(sums)
    return ModelSums(
        {index: np.concatenate([part.rows[index] for part in parts], axis=1) for index in parts[0].rows},
        SplitSums.added([part.others for part in parts]),
        np.concatenate(outputs) if outputs else None,
        {client: SplitSums.added(sums) for client, sums in by_client.items()},
    )


def cut_up(setup: Setup, pooled: ModelSums, first: int) -> ModelSums:
    """Replace the outputs of pooled test examples, the first of which has the number `first`, by the sums by client."""
    if pooled.outputs is None:
        return pooled
    by_client: dict[int, SplitSums] = {}
    for client in (*setup.evaluated_clients, *setup.unseen):
        rows = setup.partition.test[client] - first
        rows = rows[(rows >= 0) & (rows < len(pooled.outputs))]
        if len(rows):
            by_client[client] = _of_outputs(setup, pooled, pooled.outputs[rows], rows + first)
    return pooled._replace(outputs=None, by_client=by_client)


def of_client(setup: Setup, pooled: ModelSums, client: int) -> SplitSums:
    """The sums over a client's own test split, from those of the pooled test set."""
    split = setup.partition.test[client]
    others = SplitSums(len(split), {})
    if pooled.others.sums and pooled.outputs is not None:
        others = _of_outputs(setup, pooled, pooled.outputs[split], split)
    elif pooled.others.sums:
        assert pooled.by_client is not None, "own splits were not measured"
        others = pooled.by_client[client]
    rows = {index: _of_rows(rows[:, split]) for index, rows in pooled.rows.items()}
    return SplitSums(len(split), {**rows, **others.sums})


def _of_outputs(setup: Setup, pooled: ModelSums, outputs: np.ndarray, rows: np.ndarray) -> SplitSums:
    """The sums of the metrics that need the outputs [n, ...] of the pooled test examples `rows` [n]."""
    given = torch.from_numpy(outputs), torch.from_numpy(setup.dataset.test.labels[rows])
    return SplitSums(
        len(rows), {index: as_arrays(setup.metrics[index].measure(*given)) for index in pooled.others.sums}
    )


def values(setup: Setup, sums: Mapping[int, ArrayTree], of_client: bool = False) -> dict[str, float | None]:
    """The values of metrics by name. `of_client`: leave out values that the report draws for all clients together.

    A NaN made of finite sums is undefined, and becomes None; a NaN made of others says that the model has diverged.
    """
    by_name: dict[str, float | None] = {}
    for index, metric_sums in sums.items():
        metric = setup.metrics[index]
        # Without tensors the value of a mean takes a fraction of the time, which matters with many clients.
        is_mean = type(metric).value is PerExample.value
        named = metric.value(
            metric_sums if is_mean else {name: torch.as_tensor(value) for name, value in metric_sums.items()}
        )
        if any(value != value for value in named.values()) and are_finite(metric_sums):
            named = {name: None if value != value else value for name, value in named.items()}
        by_name |= {name: value for name, value in named.items() if not (of_client and metric.drawn and "/" in name)}
    return by_name


def as_arrays(sums: MetricSums) -> ArrayTree:
    """A metric's sums as arrays in main memory."""
    return {name: value.detach().cpu().numpy() for name, value in sums.items()}


def _of_rows(rows: np.ndarray) -> ArrayTree:
    """The sums of `PerExample.measure`."""
    total, count = rows.sum(axis=1)
    return {"sum": total, "count": count}
