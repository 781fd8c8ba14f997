"""The CPU buffers of engines in a pool: others read what is in them, over both transports."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.engine import Engine
from kvell.mempool.rendezvous import PageTransport
from kvell.vocabulary import MIB
from tests.elastic.buffer_audit import audit_pages
from tests.engine.seen import use_rule
from tests.engine.swapping import Always
from tests.models.cases import long_unless
from tests.models.harness import prompt_ids
from tests.models.serving.lending import Lending, said_by
from tests.together.engines import GREEDY, Mechanisms, engine_with, pool_of

KNOWN = prompt_ids(100)
ASKED = [*KNOWN, *prompt_ids(7, seed=5)]
SHORT = {"kv_memory_bytes": 3 * MIB // 2}
"""A pool for about two requests."""
SHORT_SHARED = {"memory_bytes": 9 * MIB}
SETS: tuple[Mechanisms, ...] = (("buffer",), ("buffer", "draft"), ("buffer", "memory"))

every_set = pytest.mark.parametrize(
    "mechanisms",
    [
        pytest.param(some, id="+".join(some), marks=long_unless("memory" not in some))
        for some in SETS
    ],
)
every_transport = pytest.mark.parametrize("transport", ["memory", "tcp"])


@cache
def expected() -> list[int]:
    [said] = said_by(engine_with(()), {"asked": ASKED}, GREEDY).values()
    return said.tokens


def swapping_of(engine: Engine) -> Swapping:
    swapping = engine.core.scheduler.swapping
    assert swapping is not None and swapping.prefixes is not None
    return swapping


def swap_always(several: Lending) -> None:
    """Tiny models compute any page faster than it is copied."""
    for engine in several.engines:
        swapping = swapping_of(engine)
        assert swapping.prefixes is not None
        use_rule(swapping, Always())


def hit_of(engine: Engine, tokens: list[int]) -> int:
    return engine.core.memory.peek(np.asarray([*tokens, 1], np.int32), "")


def bring_out(several: Lending, at: int) -> None:
    """Let an engine's pool run short until a known text is in its buffer alone."""
    for number in range(40):
        if hit_of(several.engines[at], KNOWN) < len(KNOWN) // 2:
            return
        several.submit(f"f{number}", prompt_ids(150, seed=number), at, GREEDY, goes_to="")
        several.run()
    raise AssertionError("the pool still has it")


@every_set
@every_transport
def test_a_text_in_the_buffer_is_sent_from_there(
    mechanisms: Mechanisms, transport: PageTransport, tmp_path: Path
) -> None:
    more: dict[str, Any] = SHORT_SHARED if "memory" in mechanisms else SHORT
    with pool_of(mechanisms, tmp_path, "ab", transport, **more) as several:
        swap_always(several)
        several.submit("known", KNOWN, 1, GREEDY, goes_to="")
        several.run()
        bring_out(several, 1)
        counts = swapping_of(several.engines[1]).buffer.counts
        fetched = counts.in_pages
        several.submit("asked", ASKED, 0, GREEDY, goes_to="", pulls_from="b")
        several.run()
        assert several.tokens["asked"] == expected()
        assert several.ends["asked"].cached_tokens >= len(KNOWN) * 3 // 4
        assert counts.sent_pages > 0
        assert counts.in_pages == fetched, "it was brought into the pool"
        several.check_pools()
        for engine in several.engines:
            assert audit_pages(swapping_of(engine).buffer) == []
