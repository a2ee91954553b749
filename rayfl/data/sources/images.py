"""Decodes users' images, from files and from bytes in tables."""

import warnings
from collections.abc import Sequence
from io import BytesIO
from logging import WARNING
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from rayfl.data.datasets import Field
from rayfl.errors import RayflError, log_once
from rayfl.limits import memory
from rayfl.limits.regular_files import reading, require_regular

ImageSide = Annotated[
    int | None, Field(ge=1, le=8192, description="pixels to which both sides are scaled; default: not scaled")
]
Channels = Annotated[Literal[1, 3], Field(description="3: colours; 1: grey")]
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, by Pillow's names, whatever a file is called: Pillow has PostScript run by Ghostscript."""
DARK = 32
"""A notice says so if no pixel is as bright, such as those of 12 bits in files of 16."""
_BITS_PER_SAMPLE = 258
"""The tag of a TIFF file with the bits of a pixel."""


def decoded(
    paths: Sequence[Path], side: int | None, channels: int, contents: Sequence[bytes] | None = None
) -> np.ndarray:
    """The images, uint8 [n, channels, height, width].

    contents: the bytes of each, which then is not read from its path. Raise RayflError if the images are too large for
    the memory, or of several sizes.
    """
    advice = "set data.side to scale all images"
    images = np.empty(0, np.uint8)
    for row, path in enumerate(paths):
        picture = read_image(path, None if contents is None else contents[row])
        if side is not None:
            picture = picture.resize((side, side))
        image = np.atleast_3d(picture if channels == 3 else picture.convert("L")).transpose(2, 0, 1)
        if row == 0:
            memory.require(len(paths) * image.nbytes, f"the data of {len(paths)} images like {path}", advice)
            images = np.empty((len(paths), *image.shape), np.uint8)
        if image.shape != images.shape[1:]:
            size, others = ("x".join(map(str, pixels.shape[:-3:-1])) for pixels in (image, images))
            raise RayflError(f"{path} is {size} pixels and not {others}: {advice}")
        images[row] = image
    if images.max() < DARK:
        log_once(
            WARNING,
            f"the brightest pixel of {len(paths)} images like {paths[0]} is {images.max()} of 255; if their "
            "files use only a part of their depth, stretch them, since few grey values are left",
        )
    return images


# Any: a picture of Pillow, which torchvision brings along.
def read_image(path: Path, content: bytes | None = None) -> Any:
    """The image of a file, or of the bytes `content`, in three colours of 8 bits.

    Raise RayflError, which names `path`, if it cannot be decoded, has more pixels than Pillow allows, or deeper ones
    than 16 bits.
    """
    from PIL import Image, UnidentifiedImageError

    # Pillow's decoders raise many types of exceptions for damaged files.
    with reading(path, f"repair or remove it (known are {', '.join(FORMATS)})", Exception):
        if content is None:
            require_regular(path)
        try:
            # A file of a few kilobytes may announce gigabytes of pixels; of some sizes Pillow only warns.
            with (
                warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
                Image.open(path if content is None else BytesIO(content), formats=FORMATS) as image,
            ):
                return (_of_8_bits(path, image) if image.mode[0] in "IF" else image).convert("RGB")
        except UnidentifiedImageError:
            raise ValueError("it is no image, or damaged") from None


# Any: pictures of Pillow.
def _of_8_bits(path: Path, image: Any) -> Any:
    """A grey image of 16 bits (of as many as a TIFF file says) by its highest 8 bits, as Pillow reads colours of 16
    bits; `convert` would make 255 of all that is larger."""
    from PIL import Image

    # Of PNG and of PNM files Pillow calls 16 bits 32.
    if not (image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))):
        raise RayflError(
            f"{path} has pixels of 32 bits or of floats (Pillow's mode {image.mode}), whose largest value is unknown: "
            "convert the images to 8 or 16 bits"
        )
    (bits,) = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))
    return Image.fromarray(np.minimum(np.asarray(image) >> (bits - 8), 255).astype(np.uint8))
