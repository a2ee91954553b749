"""Mean and deviation of a dataset's pixels, with which images are normalised."""

import numpy as np

CHUNK = 4096
"""Images counted at once, so that a dataset of gigabytes needs only megabytes more."""


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel on the [0, 1] scale, from exact counts of grey values.

    images: uint8 [n, channels, height, width], n at least 1. A channel with only one value gets a deviation of 1.
    """
    channels = images.shape[1]
    counts = np.zeros((channels, 256), np.int64)
    for start in range(0, len(images), CHUNK):
        for channel in range(channels):
            counts[channel] += np.bincount(images[start : start + CHUNK, channel].ravel(), minlength=256)
    grey = np.arange(256) / 255
    shares = counts / counts.sum(axis=1, keepdims=True)
    means = shares @ grey
    deviations = [float(np.sqrt(share @ (grey - mean) ** 2)) or 1.0 for share, mean in zip(shares, means, strict=True)]
    return tuple(map(float, means)), tuple(deviations)
