"""Pictures from encoded files: bounded before they are decoded."""

import io
import warnings
from typing import Any

from kvell.errors import ChangeSomething

MOST_FILE_BYTES = 20 << 20
MOST_PIXELS = 32 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def picture(file: bytes, field: str) -> Any:
    """A file as a PIL image in RGB; of an animation its first frame.

    :param field: names the image in an error.
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
        width, height = opened.size
        if width * height > MOST_PIXELS:  # known from its head, before anything is decoded
            remedy = f"send at most {MOST_PIXELS} pixels"
            raise ChangeSomething(field, f"{width} by {height} pixels", "is too large", remedy)
        return opened.convert("RGB")
    except Image.DecompressionBombError as error:
        problem, remedy = "is too large", f"send at most {MOST_PIXELS} pixels"
        raise ChangeSomething(field, f"{len(file)} bytes", problem, remedy) from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        remedy = f"send one of {', '.join(FORMATS)}"
        raise ChangeSomething(field, f"{len(file)} bytes", "is no picture", remedy) from error
