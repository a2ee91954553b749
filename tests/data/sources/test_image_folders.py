import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from rayfl.data.sources.image_folders import OwnImageFolder
from rayfl.data.sources.images import read_image
from tests.refusals import check_sentence, refused

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


# All depths from black to white: of 16 bits the highest 8 are k for 256 * k + anything.
SHADES = np.arange(256, dtype=np.uint8).reshape(16, 16)
DEEP = (SHADES.astype(np.uint16) << 8) + np.uint16(77)


@pytest.mark.parametrize(
    ("pixels", "name"),
    [
        (DEEP, "deep.png"),
        (DEEP, "deep.tif"),
        (DEEP.astype(">u2"), "big_endian.tif"),
        (DEEP, "deep.pgm"),
        (SHADES, "grey.png"),
        (SHADES, "grey.tif"),
        (np.stack([SHADES] * 3, axis=2), "colour.png"),
    ],
)
def test_grey_values_of_any_depth_are_scaled_to_8_bits(tmp_path: Path, pixels: np.ndarray, name: str):
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        if name.endswith(".pgm"):
            # Pillow before 10.3 does not write these.
            header = f"P5 {pixels.shape[1]} {pixels.shape[0]} 65535\n".encode()
            (tmp_path / label / name).write_bytes(header + pixels.astype(">u2").tobytes())
        else:
            Image.fromarray(pixels).save(tmp_path / label / name)
    np.testing.assert_array_equal(np.asarray(read_image(tmp_path / "a" / name)), np.stack([SHADES] * 3, axis=2))
    for channels in (1, 3):
        found = OwnImageFolder(path=str(tmp_path), test_share=0.5, channels=channels).load()
        np.testing.assert_array_equal(found.train.inputs[0], np.stack([SHADES] * channels))


def test_a_tiff_of_12_bits_is_scaled_by_12_bits(tmp_path: Path):
    # Two pixels of 12 bits in three bytes: 4095 and 256 are white and the sixteenth part of it.
    content = bytes([0xFF, 0xF1, 0x00])
    Image.fromarray(np.zeros((1, 2), np.uint16)).save(tmp_path / "a.tif")
    packed = bytearray((tmp_path / "a.tif").read_bytes())
    with Image.open(tmp_path / "a.tif") as image:
        tags = {tag: image.tag_v2[tag] for tag in (258, 273)}  # type: ignore[attr-defined]
    assert tags[258] == (16,)
    packed[tags[273][0] : tags[273][0] + 4] = content + b"\0"
    place = packed.index((258).to_bytes(2, "little") + (3).to_bytes(2, "little"))
    packed[place + 8 : place + 10] = (12).to_bytes(2, "little")
    (tmp_path / "b.tif").write_bytes(packed)
    with Image.open(tmp_path / "b.tif") as image:
        if image.mode != "I;16" or np.asarray(image).tolist() != [[4095, 256]]:
            pytest.skip("this Pillow reads 12 bits in another way")
    assert np.asarray(read_image(tmp_path / "b.tif"))[..., 0].tolist() == [[255, 16]]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_known_white_are_refused(tmp_path: Path, dtype: Any):
    mode = {np.int32: "mode I", np.float32: "mode F"}[dtype]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray((SHADES / 255).astype(dtype)).save(tmp_path / name / "one.tif")
    with refused(names=["one.tif", mode, "16 bits"]):
        OwnImageFolder(path=str(tmp_path)).load()


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK"])
def test_images_of_8_bits_are_as_pillow_makes_them(tmp_path: Path, mode: str):
    original = Image.fromarray(np.stack([SHADES, SHADES.T, SHADES[::-1]], axis=2)).convert(mode)
    path = tmp_path / ("one.tif" if mode == "CMYK" else "one.png")
    original.save(path)
    np.testing.assert_array_equal(np.asarray(read_image(path)), np.asarray(original.convert("RGB")))


def test_dark_images_get_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        # X-rays of 12 bits in files of 16.
        Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save(tmp_path / name / "one.png")
    OwnImageFolder(path=str(tmp_path), test_share=0.5).load()
    (notice,) = caplog.messages
    check_sentence(notice, ["one.png", "15 of 255"])
