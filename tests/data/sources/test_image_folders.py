import numpy as np
import pytest

from rayfl.data.sources.image_folders import CINIC10, TinyImageNet
from tests.data.files import write_image
from tests.refusals import refused


def flat(red: int, side: int) -> np.ndarray:
    return np.broadcast_to(np.array([red, 150, 200], np.uint8), (side, side, 3)).copy()


def write_cinic(folder):
    """Two images a class and split; class c has red 10 c in train, 10 c + 1 in valid and 10 c + 2 in test."""
    for split, extra in (("train", 0), ("valid", 1), ("test", 2)):
        for label, name in enumerate(("airplane", "bird", "truck")):
            for number in range(2):
                pixels = flat(10 * label + extra, 32)
                pixels[0, 1] = [1, 2, 3]
                write_image(folder / split / name / f"{name}-{number}.png", pixels)


def test_cinic_classes_are_the_sorted_folders(tmp_path):
    write_cinic(tmp_path)
    dataset = CINIC10(root=tmp_path, cache=tmp_path / "cache").load()
    assert (dataset.train.inputs.dtype, dataset.train.inputs.shape) == (np.uint8, (6, 3, 32, 32))
    assert dataset.train.labels.tolist() == dataset.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert dataset.train.inputs[:, 0, 0, 0].tolist() == [0, 0, 10, 10, 20, 20]
    # Row 0, column 1 of red, green and blue.
    assert dataset.test.inputs[2, :, 0, 1].tolist() == [1, 2, 3]
    assert dataset.test.inputs[2, :, 1, 0].tolist() == [12, 150, 200]
    assert (dataset.num_classes, dataset.augment) == (10, True)


def test_cinic_may_train_on_its_validation_images_too(tmp_path):
    write_cinic(tmp_path)
    dataset = CINIC10(root=tmp_path, cache=tmp_path / "cache", with_validation=True).load()
    assert dataset.train.inputs[:, 0, 0, 0].tolist() == [0, 0, 10, 10, 20, 20, 1, 1, 11, 11, 21, 21]
    assert dataset.train.labels.tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert len(dataset.test) == 6


def test_a_split_with_other_classes_is_refused(tmp_path):
    write_cinic(tmp_path)
    (tmp_path / "test" / "truck").rename(tmp_path / "test" / "ship")
    with refused(names=["test", "3 classes", "airplane, bird, ship", "train"]):
        CINIC10(root=tmp_path, cache=tmp_path / "cache").load()


def test_an_image_of_another_size_or_no_image_is_named(tmp_path):
    write_cinic(tmp_path)
    path = tmp_path / "train" / "bird" / "bird-1.png"
    write_image(path, flat(0, 31))
    with refused(names=["bird-1.png", "31x31 pixels", "32x32"]):
        CINIC10(root=tmp_path, cache=tmp_path / "cache").load()
    path.write_bytes(b"not an image")
    with refused(names=["bird-1.png"]):
        CINIC10(root=tmp_path, cache=tmp_path / "cache").load()


def write_tiny(folder, annotations: str):
    """Two classes with one train image each, red 0 and 100, in `images` below the class; two validation images."""
    for red, name in ((0, "n01443537"), (100, "n01629819")):
        write_image(folder / "train" / name / "images" / f"{name}_0.JPEG", flat(red, 64), "jpeg")
        (folder / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t63\t63\n")
    for number, red in ((0, 100), (1, 0)):
        write_image(folder / "val" / "images" / f"val_{number}.JPEG", flat(red, 64), "jpeg")
    (folder / "val" / "val_annotations.txt").write_text(annotations)


def test_tiny_imagenet_is_tested_on_its_annotated_validation_images(tmp_path):
    write_tiny(tmp_path, "val_0.JPEG\tn01629819\t0\t0\t1\t1\nval_1.JPEG\tn01443537\t0\t0\t1\t1\n")
    dataset = TinyImageNet(root=tmp_path, cache=tmp_path / "cache").load()
    assert dataset.train.inputs.shape == (2, 3, 64, 64) and dataset.train.labels.tolist() == [0, 1]
    assert dataset.test.labels.tolist() == [1, 0]
    # JPEG keeps colours only nearly.
    assert dataset.test.inputs[:, 0, 30, 30].astype(int) == pytest.approx([100, 0], abs=4)
    assert dataset.num_classes == 200


@pytest.mark.parametrize("line", ["val_0.JPEG\tn99999999\t0\t0\t1\t1", "val_0.JPEG n01629819"])
def test_an_annotation_that_names_no_class_is_refused(tmp_path, line):
    write_tiny(tmp_path, f"val_1.JPEG\tn01443537\t0\t0\t1\t1\n{line}\n")
    with refused(names=["tiny-imagenet", "val_annotations.txt"]):
        TinyImageNet(root=tmp_path, cache=tmp_path / "cache").load()


@pytest.mark.parametrize(("source", "file"), [(CINIC10, "CINIC-10"), (TinyImageNet, "tiny-imagenet-200")])
def test_what_to_fetch_and_where_to_put_it_is_said(tmp_path, source, file):
    with refused(names=[f"{source.name}", f"{file}"]):
        source(cache=tmp_path).load()
    # A folder without the classes is no better.
    with refused(names=["0 class folders", "train"]):
        source(root=tmp_path, cache=tmp_path / "cache").load()
