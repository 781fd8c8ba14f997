"""A request that leaves, or will leave."""

from dataclasses import dataclass

from kvell.engine.requests.request import Request


@dataclass(frozen=True)
class GoingRequest:
    """A request that moves to another instance, or will move.

    :param length: number of announced tokens: the text that is computed when it moves.
    :param root: cache root of its prefix at the target.
    :param returns_to: the instance that gets its text when it has ended; "" for none.
    """

    request: Request
    length: int
    root: str
    returns_to: str
