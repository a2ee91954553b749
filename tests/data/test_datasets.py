import warnings

import numpy as np
import pytest
import torch

from rayfl.choices.kinds import named
from rayfl.data.datasets import Dataset, Examples, Source, cropped, draw_crops
from rayfl.data.sources.idx import FOLDER, Digits, read_idx


def dataset_of(inputs: np.ndarray, kind: str, **values) -> Dataset:
    examples = Examples(inputs, np.zeros(len(inputs), np.int64))
    return Dataset("toy", examples, examples, 1, kind, **values)


def test_the_datasets_are_found_by_name():
    assert set(named(Source)) >= {"digits", "fashion-mnist", "mnist", "synthetic"}


def test_images_are_scaled_to_one_and_normalised_by_channel():
    inputs = np.array([[[[0, 255]], [[51, 102]]]], np.uint8)
    dataset = dataset_of(inputs, "image", mean=(0.5, 0.2), std=(0.25, 0.1))
    # Channel 0: (0 - .5) / .25 and (1 - .5) / .25; channel 1: (.2 - .2) / .1 and (.4 - .2) / .1.
    torch.testing.assert_close(dataset.prepare(inputs), torch.tensor([[[[-2.0, 2.0]], [[0.0, 2.0]]]]))
    assert dataset.input_shape == (2, 1, 2)


def test_white_is_the_value_that_counts_as_one():
    inputs = np.array([[[[0, 8, 16]]]], np.uint8)
    dataset = dataset_of(inputs, "image", mean=(0.0,), std=(1.0,), white=16)
    assert dataset.prepare(inputs).flatten().tolist() == [0.0, 0.5, 1.0]


def test_vectors_stay_as_they_are_and_tokens_become_integers():
    vectors = np.array([[0.5, -1.5]], np.float32)
    assert dataset_of(vectors, "vector").prepare(vectors).tolist() == vectors.tolist()
    raw = torch.from_numpy(vectors)
    assert dataset_of(vectors, "vector").normalise(raw).data_ptr() != raw.data_ptr()
    tokens = np.array([[1, 60_000]], np.uint16)
    prepared = dataset_of(tokens, "text").prepare(tokens)
    assert (prepared.dtype, prepared.tolist()) == (torch.int64, [[1, 60_000]])


@pytest.mark.parametrize("kind", ["image", "vector"])
def test_prepared_batches_share_no_memory_with_the_data(kind):
    inputs = np.ones((2, 1, 2, 2), np.uint8 if kind == "image" else np.float32)
    inputs.flags.writeable = False
    dataset = dataset_of(inputs, kind, mean=(0.0,), std=(1.0,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset.prepare(inputs).zero_()
    assert inputs.min() == 1


def test_crops_are_windows_of_the_framed_image_mirrored_half_of_the_time():
    images = np.arange(1, 2 * 3 * 5 + 1, dtype=np.uint8).reshape(1, 2, 3, 5).repeat(1000, axis=0)
    frame = np.zeros((2, 11, 13), np.uint8)
    frame[:, 4:7, 4:9] = images[0]
    windows = {frame[:, y : y + 3, x : x + 5].tobytes(): (y, x) for y in range(9) for x in range(9)}
    places, num_mirrored = set(), 0
    crops = torch.from_numpy(draw_crops(len(images), np.random.default_rng(0)))
    for crop in cropped(torch.from_numpy(images), crops).numpy():
        is_mirrored = crop.tobytes() not in windows
        num_mirrored += is_mirrored
        places.add(windows[(crop[..., ::-1] if is_mirrored else crop).tobytes()])
    # Of the 9 rows of windows 5 touch the image and 4 are black, which looks the same mirrored: 1000 * 5/9 / 2 = 278
    # look mirrored, with a standard deviation of 14.
    assert 208 < num_mirrored < 348
    # All 5 x 9 places that touch the image are drawn, and a black one.
    assert len(places) == len(windows) == 46
    assert images[0].tobytes() == np.arange(1, 31, dtype=np.uint8).tobytes()


def test_digits_ship_with_the_package():
    dataset = Digits().load()
    assert dataset.train.inputs.shape == (1437, 1, 8, 8)
    assert dataset.test.inputs.shape == (360, 1, 8, 8)
    assert dataset.train.inputs.dtype == np.uint8
    assert np.bincount(dataset.test.labels).tolist() == [36] * 10
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    # The class counts that UCI publishes for optdigits.tes.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_split_without_loss():
    dataset = Digits().load()
    together = np.concatenate([dataset.train.inputs, dataset.test.inputs]).reshape(-1, 64)
    shipped = read_idx(FOLDER / "images-idx3-ubyte.gz").reshape(-1, 64)
    assert np.array_equal(np.sort(together.view("S64"), axis=0), np.sort(shipped.copy().view("S64"), axis=0))


def test_digits_are_normalised_to_mean_zero_and_deviation_one():
    dataset = Digits().load()
    prepared = dataset.prepare(dataset.train.inputs)
    assert abs(prepared.mean().item()) < 1e-5
    assert abs(prepared.std(correction=0).item() - 1.0) < 1e-5
    white = (prepared.max().item() * dataset.std[0]) + dataset.mean[0]
    assert white == pytest.approx(1.0)


def test_the_shipped_files_are_small_and_name_their_source():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000
    assert "CC BY 4.0" in (FOLDER / "README.md").read_text()
