"""Images in messages: only data URLs.  The server never fetches an image."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import ChatMessage

MOST_IMAGES = 32
MEDIA = tuple(f"data:image/{kind};" for kind in ("png", "jpeg", "jpg", "webp", "gif"))


@dataclass(frozen=True)
class ImageUrl:
    """The data URL of an image.

    :param place: field of the request that has the image, for errors.
    """

    place: str
    url: str

    def file(self) -> bytes:
        """Return the encoded file; decoding is too slow for the thread of the event loop.

        :raises ChangeSomething: if the URL is not a data URL of a supported kind of image.
        """
        head, comma, data = self.url.partition(",")
        if not comma or not f"{head.lower()};".startswith(MEDIA) or not head.endswith("base64"):
            remedy = "send data:image/png;base64,… (or jpeg, webp, gif)"
            raise ChangeSomething(
                self.place, self.url[:24], "is not a data URL of an image", remedy
            )
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            problem, remedy = "is not base64", "encode the whole file"
            raise ChangeSomething(self.place, f"{head[:40]},…", problem, remedy) from None


def image_urls(messages: Sequence[ChatMessage], *, taken: bool) -> list[ImageUrl]:
    """Return the URLs of all images, in order.

    :param taken: whether the model accepts images.
    :raises ChangeSomething: if the model accepts no images, or there are too many.
    """
    urls = [
        ImageUrl(f"messages[{number}].content", url)
        for number, message in enumerate(messages)
        for url in message.images()
    ]
    if urls and not taken:
        raise ChangeSomething(
            urls[0].place, "image_url", "is not accepted by this model", "send text"
        )
    if len(urls) > MOST_IMAGES:
        value, remedy = f"{len(urls)} images", f"send at most {MOST_IMAGES}"
        raise ChangeSomething("messages", value, "are too many", remedy, bound="image_pixels")
    return urls
