import numpy as np
import pytest

from rayfl.data.sources.synthetic import Synthetic
from tests.refusals import refused


def test_groups_have_a_tenth_for_testing():
    dataset = Synthetic(num_groups=3, samples_per_group=40, dim=7).load()
    assert dataset.train.groups is not None
    assert dataset.test.groups is not None
    assert dataset.train.groups.tolist() == [0] * 36 + [1] * 36 + [2] * 36
    assert dataset.test.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (dataset.train.inputs.shape, dataset.train.inputs.dtype) == ((108, 7), np.float32)
    assert dataset.train.labels.dtype == np.int64


def test_the_sizes_of_the_paper_are_at_least_50_and_uneven():
    dataset = Synthetic(num_groups=30).load()
    sizes = np.bincount(np.concatenate([dataset.train.groups, dataset.test.groups]))  # type: ignore[list-item]
    assert sizes.min() >= 50
    # 50 + LogNormal(4, 2): the median is 50 + e^4 = 105; one group in 30 exceeds 50 + e^(4 + 2 * 1.83) = 2,170.
    assert 70 < np.median(sizes) < 160
    assert sizes.max() > 500


def test_the_seed_option_decides():
    first, again, other = (Synthetic(num_groups=2, samples_per_group=9, seed=seed).load() for seed in (0, 0, 1))
    assert np.array_equal(first.train.inputs, again.train.inputs)
    assert np.array_equal(first.train.labels, again.train.labels)
    assert not np.array_equal(first.train.inputs, other.train.inputs)


def test_a_group_does_not_depend_on_how_many_there_are():
    few, many = (Synthetic(num_groups=number, samples_per_group=9).load() for number in (2, 5))
    assert np.array_equal(few.train.inputs, many.train.inputs[: len(few.train)])


def test_beta_is_the_variance_of_the_groups_centres():
    # The mean over 200 dimensions of a group's examples is B_k + the mean of N(0, 1) / sqrt(200): variance beta.
    for beta in (0.0, 9.0):
        dataset = Synthetic(beta=beta, num_groups=200, samples_per_group=20, dim=200).load()
        centres = dataset.train.inputs.reshape(200, 18 * 200).mean(axis=1)
        assert centres.var() == pytest.approx(beta + 1 / 200, rel=0.35)


def test_features_have_variance_falling_with_their_number():
    dataset = Synthetic(num_groups=1, samples_per_group=4000, dim=32).load()
    variances = dataset.train.inputs.var(axis=0)
    # j^-1.2 for j = 1, 2, 4, ..., 32; an estimate from 3,600 examples has a relative deviation of sqrt(2 / 3600).
    for power in range(6):
        assert variances[2**power - 1] == pytest.approx(2.0 ** (-1.2 * power), rel=0.12)


def test_images_have_the_shape_and_labels_that_come_from_their_pixels():
    dataset = Synthetic(shape=(3, 8, 6), num_groups=2, samples_per_group=200, augment=True).load()
    assert (dataset.input_shape, dataset.kind, dataset.train.inputs.dtype) == ((3, 8, 6), "image", np.uint8)
    assert dataset.augment
    assert len(dataset.mean) == len(dataset.std) == 3
    # A pixel of 128 is a feature of 0, and 32 grey values are one unit.
    prepared = dataset.prepare(np.array([128, 160], np.uint8)[:, None, None, None].repeat(3, 1))
    np.testing.assert_allclose(prepared[:, 0, 0, 0].numpy(), [0.0, 1.0], atol=1e-5)


def test_a_group_is_labelled_by_one_linear_model():
    dataset = Synthetic(num_groups=1, samples_per_group=400, dim=3, num_classes=2, beta=0.0).load()
    inputs = np.column_stack([dataset.train.inputs, np.ones(len(dataset.train))])
    sides = np.where(dataset.train.labels == 1, 1.0, -1.0)
    weights = np.zeros(4)
    # The perceptron stops exactly where a separating plane exists, which the two logits of one model guarantee.
    for _ in range(5000):
        wrong = np.flatnonzero(sides * (inputs @ weights) <= 0)
        if not len(wrong):
            break
        weights += sides[wrong[0]] * inputs[wrong[0]]
    assert np.all(sides * (inputs @ weights) > 0)
    assert len(np.unique(sides)) == 2


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"augment": True}, ["augment=true", "shape", "remove"]),
        ({"shape": (3, 0, 4)}, ["shape=[3, 0, 4]", "3 whole numbers of at least 1"]),
        ({"alpha": -1.0}, ["alpha=-1.0", "[0, 1e+12]"]),
        ({"colour": 3}, ["colour", "alpha, augment, beta"]),
    ],
)
def test_impossible_options_are_refused(options, names):
    with refused(names=names):
        Synthetic(**options).load()
