"""Pictures from encoded files: bounded before they are decoded."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvell.errors import ChangeSomething

MOST_FILE_BYTES = 20 << 20
MOST_PIXELS = 32 << 20
"""Pixels of one picture, and of all pictures of one request together."""
MEMORY_PER_PIXEL = 40
"""Most memory per pixel while a request's pictures are decoded and converted to tensors.

Measured over one request: 4 for the decoded picture, 15 for one large picture in all, 34 for
pictures of two megapixels that the model's processor keeps at full size (Qwen-VL, LLaVA-OneVision).
"""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def pictures(files: Sequence[bytes]) -> list[Any]:
    """Decode files to PIL images in RGB; of an animation the first frame.

    They are decoded one by one, after the sizes in all their headers are checked.

    :raises ChangeSomething: naming the image that is not a picture in a known format, or too
        large; or all of them, if they are too large together.
    """
    names = [f"image {number}" for number in range(len(files))]
    pixels = sum(_pixels(file, name) for file, name in zip(files, names, strict=True))
    if pixels > MOST_PIXELS:
        value = f"{pixels} pixels in {len(files)} images"
        problem = "are too many"
        remedy = f"send at most {MOST_PIXELS} pixels in all: fewer or smaller images"
        raise ChangeSomething("messages", value, problem, remedy, bound="image_pixels")
    return [picture(file, name) for file, name in zip(files, names, strict=True)]


def picture(file: bytes, field: str) -> Any:
    """Decode a file to a PIL image in RGB; of an animation the first frame.

    :raises ChangeSomething: if it is too large, or no picture in a known format.
    """
    with _opened(file, field) as opened:
        return opened.convert("RGB")


def _pixels(file: bytes, field: str) -> int:
    with _opened(file, field) as opened:
        width, height = opened.size
        return int(width * height)


@contextmanager
def _opened(file: bytes, field: str) -> Iterator[Any]:
    """Yield a picture of which only the header was read.

    :raises ChangeSomething: if it is too large, or no picture in a known format.
    """
    # Imported here: most servers never see a picture.
    from PIL import Image, UnidentifiedImageError

    if len(file) > MOST_FILE_BYTES:
        remedy = f"send at most {MOST_FILE_BYTES} bytes"
        raise ChangeSomething(field, f"{len(file)} bytes", "is too large", remedy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(file), formats=FORMATS)
        with opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise _too_large(field, f"{width} by {height} pixels")
            yield opened
    except Image.DecompressionBombError as error:
        raise _too_large(field, f"{len(file)} bytes") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        remedy = f"send one of {', '.join(FORMATS)}"
        raise ChangeSomething(field, f"{len(file)} bytes", "is not a picture", remedy) from error


def _too_large(field: str, value: str) -> ChangeSomething:
    remedy = f"send at most {MOST_PIXELS} pixels"
    return ChangeSomething(field, value, "is too large", remedy, bound="image_pixels")
