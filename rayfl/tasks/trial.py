"""Tries a model before anything starts: passes in both modes and a step with gradients, on batches of two and of one.

What a run would meet in its first rounds is met here, and told in one sentence.
"""

import math
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rayfl.data.batches import Batch, first_two
from rayfl.data.datasets import Dataset
from rayfl.errors import RayflError, log_once, one_line, plugin_line
from rayfl.models.base import Architecture
from rayfl.models.skeleton import is_about_meta
from rayfl.network import Network
from rayfl.tasks.base import Task
from rayfl.tasks.check import check_task
from rayfl.tree import Tree
from rayfl.untyped import Outputs

MOST_COLUMNS = 32
"""Vectors of at most this number of inputs are tried on the examples with each input's smallest and largest value."""
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, eq=False)
class Trial:
    """A model with its first parameters, and the task and the data of an experiment."""

    network: Network
    task: Task
    dataset: Dataset
    architecture: Architecture
    params: Tree
    in_stacks: bool = False
    """Whether clients are trained in stacks, if the model can run under torch.vmap."""

    def check(self) -> None:
        """Raise RayflError unless the model can be trained and evaluated on the data with the task.

        The network notes whether it draws random numbers, and whether it can run under torch.vmap.
        """
        batch = first_two(self.dataset)
        layers = {*self.network.module.modules()}
        sums = self._sums()
        if unset := [name for name, (total, _) in sums.items() if math.isnan(total)]:
            raise RayflError(
                f"model {self.architecture.name!r} begins with numbers that are NaN in its parameter {unset[0]!r}; "
                "initialise it (torch.empty does not), or give model.start other weights"
            )
        with self._naming(batch), torch.no_grad():
            both = self.network.observe(self.params, batch.inputs)
        self._check_passes(batch, *both)
        # The last batch of an epoch may have one example.
        batch = Batch(batch.inputs[:1], batch.labels[:1])
        with self._naming(batch), torch.no_grad():
            both = [self.network(self.params, batch.inputs, training) for training in (True, False)]
        self._check_passes(batch, *both)
        for inputs in self._extremes():
            with self._naming(Batch(inputs, inputs)), torch.no_grad():
                self.network(self.params, inputs, training=False)
        if changed := [name for name, value in self._sums().items() if value != sums[name]]:
            raise RayflError(
                f"model {self.architecture.name!r} writes into its parameter {changed[0]!r} as it runs (max_norm of an "
                "embedding, clamp_(), or an average of weights), and clients may share it; constrain a copy of it in "
                "forward, or make what the model writes a buffer"
            )
        if self.in_stacks and self.network.vmappable:
            self.network.vmappable = self._runs_in_stacks(batch)
        if made := [name for name, layer in self.network.module.named_modules() if layer not in layers]:
            raise RayflError(
                f"model {self.architecture.name!r} makes its layer {made[0]!r} in a pass, so that nothing would train "
                "it; make it in __init__, where lazy layers such as nn.LazyLinear need no sizes"
            )

    def _sums(self) -> dict[str, tuple[float, float]]:
        """The sum and the sum of squares of each parameter, trained or frozen, which tell whether one changed."""
        frozen = {key: getattr(owner, name) for owner, name, key in self.network.frozen_slots}
        with torch.no_grad():
            return {
                name: (float(tensor.sum()), float(tensor.square().sum()))
                for name, tensor in {**self._trained, **frozen}.items()
            }

    def _check_passes(self, batch: Batch, in_training: Outputs, in_evaluation: Outputs) -> None:
        """Check the outputs in both modes, and take the gradient of a training step."""
        self._check_outputs(batch, in_training, " in training")
        self._check_outputs(batch, in_evaluation, "")
        check_task(self.task, in_evaluation, batch.labels)
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self._trained.items()}
        with self._naming(batch, " in a training step"), torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", ".*requires_grad=True. Gradients will be None")
            outputs = self.network({**self.params, **leaves}, batch.inputs)
            loss = self.task.mean_loss(outputs, batch.labels)
            if not loss.requires_grad:
                raise RayflError(
                    f"no parameter of model {self.architecture.name!r} has a gradient: its forward leaves autograd, by "
                    "detach(), torch.no_grad() or numpy"
                )
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise RayflError(
                    f"the gradient of {name!r} in model {self.architecture.name!r} is sparse; make its layer without "
                    "sparse=True"
                )

    @property
    def _trained(self) -> Tree:
        names = {name for _, _, name in self.network.slots}
        return {name: tensor for name, tensor in self.params.items() if name in names}

    def _runs_in_stacks(self, batch: Batch) -> bool:
        """Whether a training step of two clients can run under torch.vmap; not if it depends on a batch's numbers."""

        def loss(params: Tree, inputs: Tensor, labels: Tensor) -> Tensor:
            outputs, _ = self.network.advance({**self.params, **params}, Batch(inputs, labels), by_hand=True)
            return self.task.mean_loss(outputs, labels)

        two = tree_map(lambda tensor: tensor.expand(2, *tensor.shape), (self._trained, batch.inputs, batch.labels))
        try:
            torch.vmap(torch.func.grad(loss))(*two)
        # Whatever somebody's own module raises.
        except Exception:  # noqa: BLE001
            return False
        return True

    def _check_outputs(self, batch: Batch, outputs: Outputs, where: str) -> None:
        wanted = self._wanted(batch)
        leaves = tree_leaves(outputs)
        if (
            wanted is None
            and leaves
            and all(isinstance(leaf, Tensor) and len(leaf) == len(batch.inputs) for leaf in leaves)
        ):
            return
        is_tensor = isinstance(outputs, Tensor)
        if is_tensor and list(outputs.shape) == wanted and outputs.is_floating_point():
            if self.task.name == "classification" and _are_probabilities(outputs):
                log_once(
                    WARNING,
                    f"the outputs of model {self.architecture.name!r} are probabilities, and the loss of task "
                    "'classification' takes logits; return them without softmax",
                )
            return
        what = f"a {type(outputs).__name__}"
        cure = "; switch other outputs off (aux_logits=false), or give a task of your own whose output_shape is None"
        if hasattr(outputs, "logits") or (isinstance(outputs, dict) and "logits" in outputs):
            cure = "; return its logits"
        if is_tensor:
            what = f"values of type {outputs.dtype} {list(outputs.shape)}"
            cure = ""
        if self.architecture.name == "char-lstm":
            cure = f" (model.predicts={'all' if len(wanted or ()) > 2 else 'last'!r})"
        raise RayflError(
            f"{self._given(batch)}, and returns {what}{where}; it must return {self._outputs(batch)} for task "
            f"{self.task.name!r}{cure}"
        )

    def _extremes(self) -> Iterator[Tensor]:
        """Inputs with the largest token of each split, or with the extremes of each column: tables of embeddings must
        have a row for them."""
        for examples in (self.dataset.train, self.dataset.test):
            raw = examples.inputs
            if self.dataset.kind == "text":
                row, place = divmod(int(raw.argmax()), math.prod(raw.shape[1:]))
                extreme = raw[row : row + 1].copy()
                # A source's own number of tokens may be larger.
                extreme.reshape(-1)[place] = max(self.dataset.num_tokens - 1, 0)
                yield self.dataset.prepare(extreme)
            elif raw.ndim == 2 and (raw.shape[1] <= MOST_COLUMNS or self.dataset.layout is not None):
                parts = raw.T if self.dataset.layout is None else self.dataset.layout.columns(raw)
                rows = [extreme(part.reshape(len(raw), -1)) for part in parts for extreme in (_smallest, _largest)]
                yield self.dataset.prepare(raw[np.unique(rows)])

    def _wanted(self, batch: Batch) -> list[int] | None:
        """The shape of the outputs, None if the task takes any."""
        shape = self.task.output_shape(self.dataset)
        return None if shape is None else [len(batch.inputs), *shape]

    def _outputs(self, batch: Batch) -> str:
        wanted = self._wanted(batch)
        return "tensors with a row for each example" if wanted is None else f"outputs {wanted}"

    def _given(self, batch: Batch) -> str:
        count = len(batch.inputs)
        examples = f"{count} examples" if count > 1 else "1 example, as the last batch of an epoch may have,"
        inputs = list(batch.inputs.shape) if self.dataset.layout is None else self.dataset.layout
        return f"model {self.architecture.name!r} gets inputs {inputs}, {examples} of dataset {self.dataset.name!r}"

    @contextmanager
    def _naming(self, batch: Batch, where: str = "") -> Iterator[None]:
        """Turn what a pass raises into a sentence with its cause."""
        try:
            yield
        except (KeyboardInterrupt, RayflError):
            raise
        except BaseException as error:
            text = one_line(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{plugin_line(error)}")
            cure = f"it must return {self._outputs(batch)}, for batches of any size"
            embeds = any(isinstance(layer, EMBEDDINGS) for layer in self.network.module.modules())
            if embeds and self.dataset.kind != "text" and self.dataset.layout is None:
                cure += "; if it takes tokens, the data are not text"
            sentence = self._cause(error, batch.inputs) or f"{self._given(batch)}, and raises {text}{where}; {cure}"
            raise RayflError(sentence) from error

    def _cause(self, error: BaseException, inputs: Tensor) -> str | None:
        """The sentence for an error with a known cause, in a pass over `inputs`."""
        name, dataset = f"model {self.architecture.name!r}", self.dataset
        layers = {layer: key for key, layer in self.network.module.named_modules() if isinstance(layer, EMBEDDINGS)}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(frame.f_code.co_filename.endswith("checkpoint.py") for frame in frames):
            return (
                f"{name} uses gradient checkpointing (torch.utils.checkpoint), which runs layers again in the backward "
                "pass, when the parameters are no longer theirs; switch it off"
            )
        if is_about_meta(error):
            return (
                f"{name} keeps a tensor in an object that is no module ({str(error).strip()}{plugin_line(error)}); "
                "make it a buffer: self.register_buffer(NAME, tensor); layers of a list belong in nn.ModuleList"
            )
        lookups = [frame.f_locals for frame in frames if isinstance(frame.f_locals.get("self"), EMBEDDINGS)]
        if isinstance(error, IndexError) and lookups:
            layer, looked_up = lookups[-1]["self"], lookups[-1]["input"]
            are_tokens = dataset.kind == "text" and looked_up.equal(inputs)
            return self._too_few_rows(layers[layer], layer, looked_up, are_tokens)
        if dataset.kind == "text" and not layers and "Long" in str(error):
            # Whole numbers in somebody's file are taken for tokens.
            cure = ", or give data.kind='vector' if these are numbers" if dataset.name == "arrays" else ""
            models = "char-lstm or mean-embedding"
            if len(self.task.output_shape(dataset) or ()) > 1:
                models = "char-lstm with predicts='all'"
            return (
                f"{name} takes numbers, and dataset {dataset.name!r} has tokens; choose a text model, for example "
                f"{models}{cure}"
            )
        if dataset.kind != "text" and lookups and "indices" in str(error):
            return (
                f"{name} takes tokens, and dataset {dataset.name!r} is not text; choose a model for numbers, or change "
                "numbers to whole ones (x.long()) before they are embedded"
            )
        return None

    def _too_few_rows(
        self, key: str, layer: nn.Embedding | nn.EmbeddingBag, looked_up: Tensor, are_tokens: bool
    ) -> str:
        """The sentence for a number that an embedding has no row for."""
        rows, architecture, dataset = layer.num_embeddings, self.architecture, self.dataset
        number = int(looked_up.min() if looked_up.min() < 0 else looked_up.max())
        needed = dataset.num_tokens if are_tokens else number + 1
        fitting = [option for option in architecture.settable if are_tokens and "vocab" in option]
        fitting += [option for option, value in architecture.settable.items() if type(value) is int and value == rows]
        cure = f"set model.{fitting[0]}={needed}" if fitting else f"give it at least {needed} rows"
        what = f"layer {key!r} of model {architecture.name!r}"
        if are_tokens:
            return f"{what} embeds {rows} tokens, and dataset {dataset.name!r} has {dataset.num_tokens}; {cure}"
        return (
            f"{what} has {rows} rows, for the numbers 0 to {rows - 1}, and looks up {number} for examples of dataset "
            f"{dataset.name!r}; {cure if number >= 0 else 'give numbers from 0'}"
        )


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether each row [batch, classes] looks like those of a softmax."""
    sums = outputs.detach().float().sum(dim=-1)
    return (
        outputs.shape[-1] > 1 and bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    )


def _smallest(numbers: np.ndarray) -> int:
    """The row of the smallest of the numbers [n, m]."""
    return int(numbers.argmin()) // numbers.shape[1]


def _largest(numbers: np.ndarray) -> int:
    return int(numbers.argmax()) // numbers.shape[1]
