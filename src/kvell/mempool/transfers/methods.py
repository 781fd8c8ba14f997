"""By layer or by request: whether a text is pulled while its last chunk is computed; pure.

::

    by request   pass ─────────────────────────┤ pull of whole pages ──┤
    by layer     pass ── stage 0 ┤ 1 ┤ … ┤ S-1 ┤
                 pull            └ 0 ┴ 1 ┴ … ──┴ S-1 ┤

By layer hides the pull under the pass, but copies each page in as many pieces as there are stages.
Source: MemServe §5.2 and figure 12, where by-layer is quickest while load is low, and by-request
with aggregated blocks once calls of the network are what is scarce.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamCosts:
    """What it costs to read pages of an instance, and how long its passes take.

    :param bytes_per_second: of one long copy.
    :param piece_seconds: of beginning a piece of bytes that lie together.
    :param stage_seconds: of a stage beside its copy: seams of the pass, a message, two threads
        that wake, a request.
    :param token_seconds: of a pass, for each token that it computes.
    :param slows: seconds that a pass loses for each second of a pull under it.
    """

    bytes_per_second: float
    piece_seconds: float
    stage_seconds: float
    token_seconds: float
    slows: float


COPIED = StreamCosts(4e9, 3e-6, 7e-4, 3e-4, 0.25)
"""Of memory that is mapped.  Fitted to the best rounds of ``python -m bench.mempool.by_layer`` with
SmolLM2 on two busy processors of a Xeon: pulls of 24 and 47 MB at 4 to 5 GB/s, passes that lose 3
to 14 ms to eight stages, and from 2,048 tokens on no more than is gained.  A larger model computes
longer for each byte, so by layer would pay sooner than this says."""
SENT = StreamCosts(6e8, 3e-6, 7e-4, 3e-4, 1.0)
"""Over TCP, from the same command: 0.6 GB/s, and a pass that has all processors loses 0.7 to 1.1 s
for each second of sending and checksums under it, so by layer is not chosen.  With processors to
spare ``slows`` is less."""
ALWAYS = StreamCosts(1.0, 0.0, 0.0, math.inf, 0.0)
"""As if a pass hid everything: by layer pays wherever there are two stages or more."""


@dataclass(frozen=True)
class Streamed:
    """What might be pulled by layer.

    :param size_bytes: of the pages that the receiver lacks.
    :param pages: number of these.
    :param stages: in which the pass writes them.
    :param tokens: that the pass computes, of all its requests.
    """

    size_bytes: int
    pages: int
    stages: int
    tokens: int


def seconds_by_request(what: Streamed, costs: StreamCosts) -> float:
    """Seconds from the end of the pass until all pages have come, as one pull of whole pages."""
    copy_seconds = what.size_bytes / costs.bytes_per_second
    return costs.stage_seconds + copy_seconds + what.pages * costs.piece_seconds


def seconds_by_layer(what: Streamed, costs: StreamCosts) -> float:
    """Seconds from the end of the pass until all pages have come, if stages come as they are made.

    The last stage comes behind the pass in any case; of the others what the pass was too short for.
    """
    each_seconds = _stage_seconds(what, costs)
    pass_seconds = what.tokens * costs.token_seconds / what.stages
    return each_seconds + (what.stages - 1) * max(0.0, each_seconds - pass_seconds)


def pays_by_layer(what: Streamed, costs: StreamCosts) -> bool:
    """Whether by layer is quicker by more than the pass loses to messages and pulls under it."""
    if what.stages < 1 or not what.pages:
        return False
    by_layer_seconds = seconds_by_layer(what, costs)
    hidden_seconds = what.stages * _stage_seconds(what, costs) - by_layer_seconds
    lost_seconds = what.stages * costs.stage_seconds + costs.slows * hidden_seconds
    return seconds_by_request(what, costs) - by_layer_seconds > lost_seconds


def _stage_seconds(what: Streamed, costs: StreamCosts) -> float:
    """Seconds of a stage's pull."""
    copy_seconds = what.size_bytes / what.stages / costs.bytes_per_second
    return costs.stage_seconds + copy_seconds + what.pages * costs.piece_seconds
