"""The choice to pull a text while its last chunk is computed (by layer) or after it (by request).

::

    by request   pass ─────────────────────────┤ pull of whole pages ──┤
    by layer     pass ── stage 0 ┤ 1 ┤ … ┤ S-1 ┤
                 pull            └ 0 ┴ 1 ┴ … ──┴ S-1 ┤

By layer hides the pull under the pass, but copies each page in as many pieces as there are stages.
Source: MemServe §5.2 and figure 12, where by-layer is fastest under low load, and by-request with
aggregated blocks once network calls are the bottleneck.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamCosts:
    """The costs of reading pages of an instance, and the duration of its passes.

    :param bytes_per_second: the speed of one long copy.
    :param piece_seconds: the cost of starting a piece of contiguous bytes.
    :param stage_seconds: the cost of a stage besides its copy: seams of the pass, a message, two
        thread wake-ups, a request.
    :param token_seconds: the duration of a pass for each token that it computes.
    :param slows: the seconds that a pass loses for each second of a pull under it.
    """

    bytes_per_second: float
    piece_seconds: float
    stage_seconds: float
    token_seconds: float
    slows: float


COPIED = StreamCosts(4e9, 3e-6, 7e-4, 3e-4, 0.25)
"""The costs for mapped memory, fitted to the best rounds of ADR 24's measurement.

It ran SmolLM2 on two busy processors of a Xeon: pulls of 24 and 47 MB at 4 to 5 GB/s, and passes
that lose 3 to 14 ms to eight stages, from 2,048 tokens on no more than is gained.  A larger model
computes longer for each byte, so by layer would pay sooner than these costs predict.
"""
SENT = StreamCosts(6e8, 3e-6, 7e-4, 3e-4, 1.0)
"""The costs for TCP, from the same command: 0.6 GB/s, and a pass that uses all processors loses 0.7
to 1.1 s for each second of sending and checksums under it, so by layer is not chosen.  With spare
processors ``slows`` is less."""
ALWAYS = StreamCosts(1.0, 0.0, 0.0, math.inf, 0.0)
"""Costs as if a pass hid every pull: by layer pays for two stages or more."""


@dataclass(frozen=True)
class LayerPull:
    """A candidate for a pull by layer.

    :param size_bytes: the bytes of the pages that the receiver lacks.
    :param stages: the number of stages in which the pass writes them.
    :param tokens: the number of tokens that the pass computes, of all its requests.
    """

    size_bytes: int
    pages: int
    stages: int
    tokens: int


def seconds_by_request(what: LayerPull, costs: StreamCosts) -> float:
    """Return the seconds from the end of the pass to the end of one pull of whole pages."""
    copy_seconds = what.size_bytes / costs.bytes_per_second
    return costs.stage_seconds + copy_seconds + what.pages * costs.piece_seconds


def seconds_by_layer(what: LayerPull, costs: StreamCosts) -> float:
    """Return the seconds from the end of the pass to the end of a pull by layer.

    The last stage is always pulled after the pass, the others as far as the pass was too short.
    """
    each_seconds = _stage_seconds(what, costs)
    pass_seconds = what.tokens * costs.token_seconds / what.stages
    return each_seconds + (what.stages - 1) * max(0.0, each_seconds - pass_seconds)


def pays_by_layer(what: LayerPull, costs: StreamCosts) -> bool:
    """Return whether by layer is faster by more than the pass loses to messages and pulls."""
    if what.stages < 1 or not what.pages:
        return False
    by_layer_seconds = seconds_by_layer(what, costs)
    hidden_seconds = what.stages * _stage_seconds(what, costs) - by_layer_seconds
    lost_seconds = what.stages * costs.stage_seconds + costs.slows * hidden_seconds
    return seconds_by_request(what, costs) - by_layer_seconds > lost_seconds


def _stage_seconds(what: LayerPull, costs: StreamCosts) -> float:
    copy_seconds = what.size_bytes / what.stages / costs.bytes_per_second
    return costs.stage_seconds + copy_seconds + what.pages * costs.piece_seconds
