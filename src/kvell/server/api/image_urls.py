"""Images of messages: data URLs alone.  Nothing is ever fetched from elsewhere."""

import base64
import binascii
from collections.abc import Sequence

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import ChatMessage

MOST_IMAGES = 32
MEDIA = tuple(f"data:image/{kind};" for kind in ("png", "jpeg", "jpg", "webp", "gif"))


def image_files(messages: Sequence[ChatMessage], *, taken: bool) -> list[bytes]:
    """The encoded files of all images, in order.

    :param taken: whether the model takes images.
    :raises ChangeSomething: naming the image that is not served, and why.
    """
    places = [
        (f"messages[{number}].content", url)
        for number, message in enumerate(messages)
        for url in message.images()
    ]
    if places and not taken:
        raise ChangeSomething(places[0][0], "image_url", "is not taken by this model", "send text")
    if len(places) > MOST_IMAGES:
        remedy = f"send at most {MOST_IMAGES}"
        raise ChangeSomething("messages", f"{len(places)} images", "are too many", remedy)
    return [_file(place, url) for place, url in places]


def _file(place: str, url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not f"{head.lower()};".startswith(MEDIA) or not head.endswith("base64"):
        remedy = "send data:image/png;base64,… (or jpeg, webp, gif)"
        raise ChangeSomething(place, url[:24], "is no data URL of an image", remedy)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        problem, remedy = "is not base64", "encode the whole file"
        raise ChangeSomething(place, f"{head[:40]},…", problem, remedy) from None
