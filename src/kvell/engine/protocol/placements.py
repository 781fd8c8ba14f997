"""The placement of requests' KV caches on instances (Infinite-LLM §6.2, Listing 1)."""

from dataclasses import dataclass

from kvell.vocabulary import RequestId


@dataclass(frozen=True)
class RequestPlacementEntry:
    """A part of one request's KV cache.

    :param req_id: the request's id.
    :param inst_id: the instance that holds the part.
    :param num_blocks: number of sections, each of at most ``SECTION_TOKENS`` tokens.
    :param local: whether that instance computes the request.
    """

    req_id: RequestId
    inst_id: str
    num_blocks: int
    local: bool
