"""Engines with a CPU buffer over the virtual model, and swap rules for tests."""

import random
from collections.abc import Callable

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.core.core import EngineCore
from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.requests.limits import Limits
from kvell.memory import MemoryCore, create_core
from kvell.pages.layout import Layout
from tests.engine.conftest import EOS


class Always(SwapRule):
    def __init__(self) -> None:
        super().__init__(0.0)

    def swaps(self, tokens: int, size_bytes: int) -> bool:
        return True


class AtRandom(SwapRule):
    """A rule that swaps at random, from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.0)
        self._draw = random.Random(seed)

    def swaps(self, tokens: int, size_bytes: int) -> bool:
        return self._draw.random() < 0.7


def swapping_core(
    layout: Layout,
    limits: Limits,
    num_large: int,
    rule: SwapRule | None = None,
    make: Callable[[MemoryCore, PageBuffer, SwapRule], Swapping] = Swapping,
    ahead: int | None = None,
    *,
    keeps_prefixes: bool = False,
    buffer_large: int | None = None,
) -> EngineCore:
    """An engine core with a buffer of ``num_large`` large pages.

    :param ahead: large pages that prompts may first take to go ahead of decodes; None: never.
    :param keeps_prefixes: whether the buffer also keeps evicted prefixes.
    :param buffer_large: its first large page, if prompts may be computed into it.
    """
    core = create_core(layout)
    buffer = PageBuffer(layout.groups, num_large)
    swapping = make(core, buffer, rule or Always())
    if keeps_prefixes:
        swapping.prefixes = BufferedPrefixes(core, buffer, rule or Always())
    parking = None
    if ahead is not None:
        sizes = CpuBuffer(num_large, ahead)
        parking = Parking(core, swapping, sizes, limits.min_chunk_tokens)
    return EngineCore(
        core,
        limits,
        frozenset({EOS}),
        swapping=swapping,
        parking=parking,
        buffer_large=buffer_large,
    )
