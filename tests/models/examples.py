"""Every model small enough to train in a test, with examples of its kind."""

from collections.abc import Mapping, Sequence

import torch

from rayfl.data.batches import Batch
from rayfl.models.base import Architecture
from rayfl.models.convolutional import EMNISTCNN, VGG11, AlexNetMCEPL, ConvNet2, ResNet18, ResNet18BatchNorm, ResNet20
from rayfl.models.dense import MLP, Logistic
from rayfl.models.text import CharLSTM, MeanEmbedding
from rayfl.models.transformers import ViTTiny
from rayfl.task import NetworkTask
from tests.bound_tasks import classification

IMAGE, COLOUR = (1, 28, 28), (3, 32, 32)
NUM_TOKENS = 12
"""Tokens of the texts here; 0 is padding."""

EXAMPLES: Mapping[str, tuple[Architecture, tuple[int, ...], int]] = {
    "logistic": (Logistic(), IMAGE, 10),
    "mlp": (MLP(hidden=(20,)), IMAGE, 10),
    "convnet2": (ConvNet2(), IMAGE, 10),
    "emnist-cnn": (EMNISTCNN(), IMAGE, 62),
    "resnet18": (ResNet18(), COLOUR, 10),
    "resnet20": (ResNet20(), COLOUR, 10),
    "vgg11": (VGG11(), COLOUR, 10),
    "alexnet-mcepl": (AlexNetMCEPL(), COLOUR, 10),
    "vit-tiny": (ViTTiny(patch=8, width=12, depth=2), COLOUR, 10),
    "char-lstm": (CharLSTM(embedding=4, hidden=10), (9,), NUM_TOKENS),
    "mean-embedding": (MeanEmbedding(vocabulary=NUM_TOKENS, embedding=4), (9,), 2),
}
"""By name: a model, the shape of an example, and the number of classes."""
WITH_BUFFERS: Mapping[str, tuple[Architecture, tuple[int, ...], int]] = {
    "resnet18-batchnorm": (ResNet18BatchNorm(), COLOUR, 10),
}
"""The same of models whose buffers training changes."""


def task_of(name: str, model: Architecture | None = None) -> NetworkTask:
    """Classification by the example of that name, or by another form of it."""
    example, shape, num_classes = EXAMPLES[name]
    return classification((model or example).builder(shape, num_classes), shape)


def batch_of(name: str, size: int, seed: int = 0) -> Batch:
    """Gaussian images, or texts with padding behind; random labels."""
    _, shape, num_classes = EXAMPLES[name]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, num_classes, (size,), generator=generator)
    if len(shape) == 3:
        return Batch(torch.randn(size, *shape, generator=generator), labels)
    texts = torch.randint(1, NUM_TOKENS, (size, *shape), generator=generator)
    texts[::2, -3:] = 0
    return Batch(texts, labels)


def pad(batches_of_clients: Sequence[Batch], size: int | None = None) -> Batch:
    """One batch a client, stacked to [num_clients, size, ...] with weights 0 on the padding.

    Without a `size` it is that of the largest batch, and the weights stay None where nothing is padded and no batch has
    any.
    """
    sizes = [len(batch.labels) for batch in batches_of_clients]
    largest = size or max(sizes)
    first = batches_of_clients[0]
    if size is None and min(sizes) == largest and all(batch.weights is None for batch in batches_of_clients):
        inputs = torch.stack([batch.inputs for batch in batches_of_clients])
        return Batch(inputs, torch.stack([batch.labels for batch in batches_of_clients]))
    inputs = first.inputs.new_zeros((len(sizes), largest, *first.inputs.shape[1:]))
    labels = first.labels.new_zeros((len(sizes), largest))
    weights = torch.zeros((len(sizes), largest), device=first.inputs.device)
    for client, (count, batch) in enumerate(zip(sizes, batches_of_clients, strict=True)):
        inputs[client, :count] = batch.inputs
        labels[client, :count] = batch.labels
        weights[client, :count] = 1.0 if batch.weights is None else batch.weights
    return Batch(inputs, labels, weights)
