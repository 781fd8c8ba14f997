"""The bench's ideal packer: what it counts, and that the same loop runs over it."""

from dataclasses import replace

import numpy as np
import pytest

from bench.replay.ideal import IdealCore
from kvell.clock import VirtualClock
from kvell.memory import (
    GroupKind,
    LayerSpec,
    Layout,
    MemoryCore,
    create_core,
    plan_layout,
)
from kvell.prefix.interface import Ints
from kvell.simulator.replay.replay import Replay
from kvell.simulator.traces.rows import TraceRow
from tests.simulator.replays import MACHINE, layer_of, layers_in, layout_of, limits_of, row

TOKEN_BYTES = 32
WINDOW = 5


def ints(*values: int) -> Ints:
    return np.asarray(values, np.int32)


def pool_of(tokens: int, *specs: LayerSpec) -> IdealCore:
    """A core with room for this many tokens of 32 bytes in one layer."""
    layout = plan_layout(specs, 1 << 20)
    groups = layout.groups
    return IdealCore(Layout(groups, 1, tokens * TOKEN_BYTES))


def full_and_window(tokens: int) -> IdealCore:
    return pool_of(tokens, layer_of(0, 0, 1), layer_of(1, WINDOW, 1))


def opened(core: MemoryCore, length: int) -> int:
    handle = core.open(np.arange(length, dtype=np.int32), "")
    core.claim(handle, length)
    return handle


def test_a_pool_of_bytes_is_used_to_the_last_one() -> None:
    core = pool_of(10, layer_of(0, 0, 1))
    first, second = opened(core, 7), opened(core, 7)
    served, rows = core.grow(ints(first, second), ints(7, 4))
    assert (served, len(rows)) == (1, 0)
    assert core.largest(second, 7) == 3
    assert core.grow(ints(second), ints(3))[0] == 1
    assert core.totals().empty_large == 0
    core.close(first)
    assert core.totals().empty_large == 7 * TOKEN_BYTES


def test_what_is_behind_a_window_is_free_when_the_step_is_over() -> None:
    core = full_and_window(100)
    request = opened(core, 20)
    core.grow(ints(request), ints(20))
    assert core.totals().used_pages == (20, 20), "the step reads all of the chunk"
    core.advance(ints(request), ints(20))
    assert core.totals().used_pages == (20, WINDOW - 1), "the next token is the window's last"
    core.grow(ints(request), ints(21))
    assert core.totals().used_pages == (21, WINDOW)


@pytest.mark.parametrize(("tokens", "fits"), [(19, False), (20, True)])
def test_a_request_fits_at_its_worst_step(tokens: int, fits: bool) -> None:
    """12 tokens in chunks of 3: all of them in the full layer, a window and a chunk beside."""
    core = full_and_window(tokens)
    request = opened(core, 12)
    assert core.fits(request, 12, 3, ints(), ints()) is fits


def test_others_keep_what_they_need_next() -> None:
    core = pool_of(10, layer_of(0, 0, 1))
    first, second = opened(core, 5), opened(core, 5)
    core.grow(ints(first), ints(5))
    assert core.fits(second, 5, 5, ints(first), ints(5))
    assert not core.fits(second, 5, 5, ints(first), ints(6))


def test_a_lease_expires_unless_it_is_claimed() -> None:
    core = pool_of(10, layer_of(0, 0, 1))
    prompt = np.arange(4, dtype=np.int32)
    left, taken = core.open(prompt, "", 3), core.open(prompt, "", 3)
    core.grow(ints(left, taken), ints(4, 4))
    core.begin_step(3)
    core.claim(taken, 5)
    assert core.totals().used_pages == (8,)
    core.begin_step(4)
    assert core.totals().used_pages == (4,)


def test_images_and_states_are_counted_in_their_own_units() -> None:
    layers = [
        layer_of(0, 0, 1),
        LayerSpec(1, GroupKind.CROSS, 1, 8, 2),
        LayerSpec(2, GroupKind.STATE, 0, 0, 2, state_bytes=320),
    ]
    core = pool_of(100, *layers)
    request = core.open(np.arange(4, dtype=np.int32), "", images=ints(0, 1, 40).reshape(1, 3))
    core.grow(ints(request), ints(4))
    assert core.totals().used_pages == (4, 40, 1)
    assert core.totals().empty_large == (100 - 4 - 40 - 10) * TOKEN_BYTES


def rows_that_share_nothing(seed: int) -> list[TraceRow]:
    """Rows with one output token: with more, a preempted request would hit its own tokens."""
    draw = np.random.default_rng(seed)
    return [row(int(draw.integers(1, 120)), 1) for _ in range(60)]


def lives(core: MemoryCore, layout: Layout, seed: int) -> list[tuple[int, int]]:
    """The steps at which each request was admitted and ended."""
    limits = replace(limits_of(layout), max_num_batched_tokens=256)
    rows = rows_that_share_nothing(seed)
    run = Replay(core, layers_in(layout), limits, rows, "start", MACHINE, VirtualClock())
    run.run()
    assert run.means.means().batch > 2
    return [(each.admitted_step or 0, each.finish_step or 0) for each in run.requests]


@pytest.mark.parametrize("seed", range(4))
def test_pages_of_one_token_are_as_good(seed: int) -> None:
    """Full attention alone, in large pages of one token: they are as good as bytes."""
    spec = layer_of(0, 0, 2)
    layout = plan_layout([spec], 256 * spec.token_bytes, page_tokens=1)
    assert layout.large_page_bytes == spec.token_bytes
    ideal = lives(IdealCore(layout), layout, seed)
    assert ideal == lives(create_core(layout), layout, seed)
    assert max(end for _, end in ideal) > 14, "memory, not the step, is what is short"


@pytest.mark.parametrize("seed", range(4))
def test_windows_and_pages_never_beat_it_by_much(seed: int) -> None:
    layout = layout_of((0, 1), (9, 2), large_pages=60)
    ideal, ours = (lives(core, layout, seed) for core in (IdealCore(layout), create_core(layout)))
    assert max(end for _, end in ideal) <= 1.02 * max(end for _, end in ours)
