"""A request that leaves, or will."""

from dataclasses import dataclass

from kvell.engine.requests.request import Request


@dataclass(frozen=True)
class GoingRequest:
    """A request that is on its way to another instance, or will be.

    :param length: tokens that were announced: the text that is computed when it moves.
    :param root: of its prefix there.
    :param returns_to: the instance that gets its text in the end; "" for none.
    """

    request: Request
    length: int
    root: str
    returns_to: str
