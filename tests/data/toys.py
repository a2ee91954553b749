"""Small datasets whose every input tells which example it is."""

import numpy as np

from rayfl.data.datasets import Dataset, Examples


def numbered_images(
    train_labels: np.ndarray, test_labels: np.ndarray, shape: tuple[int, int, int] = (1, 1, 2), augment: bool = False
) -> Dataset:
    """Images filled with their own number modulo 256 (test images count down from 255); mean 0 and std 1."""
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    train = np.arange(len(train_labels)).astype(np.uint8)
    test = (255 - np.arange(len(test_labels))).astype(np.uint8)
    channels = shape[0]
    return Dataset(
        name="numbered",
        train=Examples(np.broadcast_to(train[:, None, None, None], (len(train), *shape)).copy(), train_labels),
        test=Examples(np.broadcast_to(test[:, None, None, None], (len(test), *shape)).copy(), test_labels),
        num_classes=num_classes,
        kind="image",
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        augment=augment,
    )


def balanced(num_classes: int, train_per_class: int, test_per_class: int, seed: int = 0) -> Dataset:
    """Equally many examples of each class, in random order."""
    draw = np.random.default_rng(seed)
    return numbered_images(
        draw.permutation(np.repeat(np.arange(num_classes), train_per_class)),
        draw.permutation(np.repeat(np.arange(num_classes), test_per_class)),
    )
