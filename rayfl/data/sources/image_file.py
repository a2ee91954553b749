"""One image file, whose size is known before it is decoded."""

import warnings
from pathlib import Path
from typing import Any

from rayfl.errors import RayflError, reason
from rayfl.limits.regular_files import require_regular

MOST_PIXELS = 80_000_000
"""Pixels of the largest image that is decoded: 240 MB as bytes. A file of a few kilobytes may hold far more."""


# Any: a picture of Pillow, which torchvision brings along.
def read_image(path: Path, advice: str) -> Any:
    """The picture in three colours. RayflError, which ends with `advice`, for what is no image or has too many
    pixels."""
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
    # Pillow's formats raise whatever a damaged file makes them stumble over.
    except Exception as error:  # noqa: BLE001
        why = str(error).partition("\n")[0] or type(error).__name__
    raise RayflError(f"{path} cannot be read ({why}); {advice}")
