"""What the oracle and tests of the core look at."""

from kvell.pages.snapshot import PoolSnapshot
from kvell.prefix.groups.facts import Facts, ImageSpan


def content_tokens(image: ImageSpan) -> int:
    """The number of leading tokens of the span that identify the image's content."""
    return min(image.tokens, image.image_tokens)


def cuts_image(facts: Facts, length: int) -> bool:
    """Whether a prefix of ``length`` tokens ends inside an image."""
    return any(image.start < length < image.end for image in facts.images)


def empty_larges(state: PoolSnapshot) -> int:
    """The number of available large pages that belong to no group."""
    return sum(1 for group in state.group if group < 0) - len(state.withheld)
