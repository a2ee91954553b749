import os
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin

from rayfl.data.sources.image_folders import OwnImageFolder, TinyImageNet
from tests.data.files import write_image
from tests.refusals import refused


def flat(red: int, side: int) -> np.ndarray:
    return np.broadcast_to(np.array([red, 150, 200], np.uint8), (side, side, 3)).copy()


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


ANNOTATIONS = "val_0.JPEG\tn01629819\t0\t0\t1\t1\nval_1.JPEG\tn01443537\t0\t0\t1\t1\n"


def test_an_image_of_another_size_or_no_image_is_named(tmp_path):
    write_tiny(tmp_path, ANNOTATIONS)
    path = tmp_path / "train" / "n01443537" / "images" / "n01443537_0.JPEG"
    write_image(path, flat(0, 31), "jpeg")
    with refused(names=[path.name, "31x31 pixels", "64x64"]):
        TinyImageNet(root=tmp_path, cache=tmp_path / "cache").load()
    path.write_bytes(b"not an image")
    with refused(names=[path.name]):
        TinyImageNet(root=tmp_path, cache=tmp_path / "cache").load()


def test_what_to_fetch_and_where_to_put_it_is_said(tmp_path):
    with refused(names=["tiny-imagenet", "tiny-imagenet-200"]):
        TinyImageNet(cache=tmp_path).load()
    # A folder without the classes is no better.
    with refused(names=["0 class folders", "train"]):
        TinyImageNet(root=tmp_path, cache=tmp_path / "cache").load()
    write_tiny(tmp_path, ANNOTATIONS)
    (tmp_path / "train" / "n01443537" / "images" / "n01443537_0.JPEG").unlink()
    with refused(names=["train", "without images"]):
        TinyImageNet(root=tmp_path, cache=tmp_path / "cache").load()


EPS = """%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 4 4
%%EndComments
showpage
%%EOF
"""


def test_no_program_is_started_for_postscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    programs, started = tmp_path / "programs", tmp_path / "started"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {started}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "one.png").write_text(EPS)
    with refused(names=["one.png", "PNG"]):
        OwnImageFolder(path=str(tmp_path / "images")).load()
    assert not started.exists()
