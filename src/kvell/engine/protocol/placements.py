"""Where the KV cache of requests lies (Infinite-LLM §6.2, Listing 1)."""

from dataclasses import dataclass

from kvell.vocabulary import RequestId


@dataclass(frozen=True)
class RequestPlacementEntry:
    """A part of one request's KV cache.

    :param req_id: of the request.
    :param inst_id: the instance that has it.
    :param num_blocks: sections of ``SECTION_TOKENS`` tokens, at most.
    :param local: whether the request is computed there.
    """

    req_id: RequestId
    inst_id: str
    num_blocks: int
    local: bool
