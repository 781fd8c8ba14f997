"""The cheap counts of the meter against a walk over every page, after every step."""

from collections.abc import Iterator

import pytest

from kvell.clock import VirtualClock
from kvell.memory import HoldingCore, Layout, PoolSnapshot, create_core, policy_of
from kvell.simulator.report.metrics import Sample
from tests.simulator.replays import MACHINE, Replay, busy_rows, layers_in, layout_of, limits_of

SHAPES = [((0, 1),), ((0, 1), (9, 2)), ((0, 3), (21, 1), (5, 2))]


class Watched(Replay):
    """A replay that keeps the pool's whole state beside each sample."""

    def __init__(self, core: HoldingCore, layout: Layout, seed: int) -> None:
        self.states: list[PoolSnapshot] = []
        rows = busy_rows(seed, 24)
        limits, layers = limits_of(layout), layers_in(layout)
        super().__init__(core, layers, limits, rows, "start", MACHINE, VirtualClock())
        self._core = core

    def _on_sampled(self) -> None:
        self.states.append(self._core.snapshot())

    def pairs(self) -> Iterator[tuple[Sample, PoolSnapshot]]:
        return zip(self.means.samples, self.states, strict=True)


@pytest.fixture(params=[(shape, seed) for shape in SHAPES for seed in range(2)])
def watched(request: pytest.FixtureRequest) -> Watched:
    shape, seed = request.param
    layout = layout_of(*shape, large_pages=30 * len(shape))
    run = Watched(create_core(layout), layout, seed)
    run.run()
    return run


def tokens_of_pages(layout: Layout, state: PoolSnapshot, group: int) -> dict[int, int]:
    """Page → tokens that its most demanding user may still read."""
    spec = layout.groups[group]
    policy, size = policy_of(spec), spec.page_tokens
    needed: dict[int, int] = {}
    for holder in state.holders:
        first, pages = holder.groups[group]
        start = policy.active_start(holder.computed)
        for position, page in enumerate(pages, start=first):
            end = min((position + 1) * size, holder.computed)
            tokens = max(0, end - max(start, position * size))
            needed[page] = max(tokens, needed.get(page, 0))
    return needed


def test_every_byte_beside_a_used_page_is_counted_once(watched: Watched) -> None:
    layout = watched.spec.layout
    for sample, state in watched.pairs():
        for g, group in enumerate(sample.groups):
            in_use = sum(
                1 for of, used in zip(state.group, state.used, strict=True) if used and of == g
            )
            counted = group.allocated_bytes + group.stranded_bytes
            assert counted == in_use * layout.large_page_bytes
            assert group.used_bytes == len(state.refs[g]) * layout.groups[g].page_stride_bytes


def test_needed_is_what_a_walk_over_all_pages_finds(watched: Watched) -> None:
    layout = watched.spec.layout
    exact_steps = 0
    for sample, state in watched.pairs():
        assert sample.running == len(state.holders)
        for g, spec in enumerate(layout.groups):
            walked = sum(tokens_of_pages(layout, state, g).values()) * spec.token_bytes
            counted = sample.groups[g].needed_bytes
            slack = spec.page_tokens * spec.token_bytes * len(state.holders)
            assert walked - slack < counted <= walked
            exact_steps += counted == walked
    assert exact_steps > 0.8 * len(watched.states) * len(layout.groups)
