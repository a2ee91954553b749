"""Reads an image file after a look at the number of its pixels."""

import warnings
from pathlib import Path
from typing import Any

from rayfl.errors import RayflError, reason
from rayfl.limits.regular_files import require_regular

MOST_PIXELS = 80_000_000
"""Pixels of the largest image that is decoded: 240 MB as bytes. A file of a few kilobytes may announce far more."""


# Any: a picture of Pillow, which torchvision brings along.
def read_image(path: Path, advice: str) -> Any:
    """The image in three colours. If it cannot be decoded or is too large, RayflError ends with `advice`."""
    from PIL import Image

    try:
        require_regular(path)
        with warnings.catch_warnings():
            # Pillow warns of large images, and these are refused.
            warnings.simplefilter("ignore")
            opened = Image.open(path)
        with opened as image:
            if image.width * image.height <= MOST_PIXELS:
                return image.convert("RGB")
            why = f"it is {image.width}x{image.height} pixels, more than the {MOST_PIXELS:,} that are decoded"
    except MemoryError:
        raise
    except OSError as error:
        why = reason(error)
    # Pillow's decoders raise many types of exceptions for damaged files.
    except Exception as error:  # noqa: BLE001
        why = str(error).partition("\n")[0] or type(error).__name__
    raise RayflError(f"{path} cannot be read ({why}); {advice}")
