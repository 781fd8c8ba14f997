"""Prefixes that the pool evicts are found again in the buffer: exact, journaled, bounded."""

from collections.abc import Sequence

import numpy as np

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.cpu_buffer.buffered_prefixes import MOST_REMEMBERED, BufferedPrefixes
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.requests.plan import StepPlan
from kvell.engine.requests.request import NO_HANDLE
from kvell.mempool.tiers.digests import PrefixDigests
from kvell.mempool.tiers.lookup import Tiers
from kvell.pages.layout import Layout
from tests.depth import machine
from tests.elastic.buffer_audit import audit_pages
from tests.engine.conftest import make_layout
from tests.engine.cpu_buffer.machines import Losing, ParkingMachine, Run
from tests.engine.swapping import Always, AtRandom, swapping_core
from tests.engine.traffic import limits
from tests.engine.virtual_model import expected_output

FULL_AND_SLIDING = make_layout((0, 9), 12)
LIMITS = limits(batched=16, seats=4, max_len=64)
NONE_KNOWN = np.empty((0, 4), np.int32)
"""The pool names no page of a text."""


def ints(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(tokens, np.int32)


def run_of(
    num_large: int = 120,
    layout: Layout = FULL_AND_SLIDING,
    journal: Journal | None = None,
) -> Run:
    core = swapping_core(layout, LIMITS, num_large, keeps_prefixes=True)
    return Run(core, journal)


def ask(run: Run, name: str, prompt: Sequence[int], max_tokens: int = 4) -> int:
    """Run one request alone; return the tokens that it did not compute."""
    run.submit(name, prompt, max_tokens)
    while run.core.has_work:
        run.step()
    assert run.outputs[name] == expected_output(list(prompt), max_tokens)
    return run.ended[name].cached_tokens


def text(seed: int, count: int = 40) -> list[int]:
    return [(7 * seed + 3 * i + i * i * (seed + 1)) % 50 for i in range(count)]


def prefixes_of(run: Run) -> BufferedPrefixes:
    assert run.swapping.prefixes is not None
    return run.swapping.prefixes


def test_what_the_pool_has_evicted_is_found_in_the_buffer() -> None:
    run = run_of()
    assert ask(run, "first", text(0)) == 0
    for number in range(1, 12):
        assert ask(run, f"other {number}", text(number)) == 0
    on_device = run.core.memory.peek(ints([*text(0), 1]), "")
    assert on_device < 20, "it was evicted"
    before = run.model.tokens_computed
    cached = ask(run, "again", [*text(0), 1, 2, 3])
    assert cached >= 40 > on_device
    assert run.model.tokens_computed - before == 43 - cached + 3
    assert prefixes_of(run).hit_tokens == cached - on_device
    rungs = run.core.stats().rungs
    assert rungs["cache_out"] > 0
    assert rungs["cache_in"] == 1
    figures = run.core.stats().buffer
    assert figures["holders"] == 0
    assert figures["cache_hit_tokens"] == prefixes_of(run).hit_tokens
    assert figures["cached_pages"] == len(prefixes_of(run).pages) == figures["held_pages"]


def test_the_next_turn_of_a_conversation_goes_on_behind_its_answer() -> None:
    run = run_of()
    ask(run, "first", text(0, 30), 10)
    for number in range(1, 12):
        ask(run, f"other {number}", text(number))
    turn = [*text(0, 30), *run.outputs["first"], 5, 6]
    assert ask(run, "second", turn) >= 36, "to the end of its last whole page"


def test_without_a_buffer_it_is_computed_again() -> None:
    run = run_of(num_large=0)
    for number in range(12):
        ask(run, f"other {number}", text(number))
    assert ask(run, "again", [*text(0), 1, 2, 3]) < 20
    assert prefixes_of(run).hit_tokens == 0


def test_while_memory_is_idle_nothing_is_copied() -> None:
    run = run_of(layout=make_layout((0, 9), 200))
    for number in range(6):
        ask(run, str(number), text(number))
    assert run.core.stats().rungs["cache_out"] == 0


def test_prefixes_that_begin_alike_share_pages() -> None:
    run = run_of()
    for number in range(12):
        ask(run, f"q{number}", [*text(0, 32), *text(number + 1, 8)])
    shared = {page for row in run.plans for page in map(tuple, row.offloads[:, [0, 2]].tolist())}
    begins = PrefixDigests(ints(text(0, 32)), "0:")
    pages = prefixes_of(run).pages
    assert Tiers(pages, [0], begins, NONE_KNOWN).longest >= 28
    assert len(pages) <= len(shared) < 12 * 10, "not once for each"


def test_who_is_preempted_goes_before_prefixes() -> None:
    run = run_of(num_large=6)
    for number in range(12):
        ask(run, f"other {number}", text(number))
    held = len(prefixes_of(run).pages)
    assert held > 0
    run.swapping.begin()
    need = [0] * len(FULL_AND_SLIDING.groups)
    need[0] = run.swapping.buffer.num_large * FULL_AND_SLIDING.groups[0].pages_per_large
    assert not run.swapping.buffer.has_room(need)
    prefixes_of(run).pages.make_room(need)
    assert run.swapping.buffer.has_room(need)
    assert len(prefixes_of(run).pages) < held


def test_what_made_way_before_a_second_try_is_not_fetched() -> None:
    """A prompt without room preempts others, whose pages may replace its own in the buffer."""
    run = run_of()
    ask(run, "first", text(0))
    for number in range(1, 12):
        ask(run, f"other {number}", text(number))
    run.submit("again", text(0, 60), 4)
    [request] = run.core.scheduler.seats.waiting
    run.swapping.begin()

    def opened() -> int:
        tokens = request.tokens(0, request.num_tokens)
        request.handle = run.core.memory.open(tokens, request.cache_root)
        request.computed = run.core.memory.hit_tokens(request.handle)
        run.swapping.resume(request)
        return request.computed

    found = opened()
    run.core.memory.close(request.handle, renew=False)
    prefixes_of(run).pages.clear()
    assert opened() < found
    held = run.core.memory.held_pages(request.handle)
    assert run.core.memory.grow(ints([request.handle]), ints([16]))[0] == 1
    assert len(run.swapping.fetch(request, held)) == 0
    run.core.memory.close(request.handle, renew=False)
    request.handle, request.computed = NO_HANDLE, 0
    while run.core.has_work:
        run.step()
    assert run.outputs["again"] == expected_output(text(0, 60), 4)


def test_what_is_remembered_is_bounded() -> None:
    run = run_of(layout=make_layout((0,), 400))
    for number in range(MOST_REMEMBERED + 5):
        ask(run, str(number), [number % 50, number // 50, 1], 1)
    assert len(prefixes_of(run).ended) == MOST_REMEMBERED


def test_letting_go_empties_the_buffer() -> None:
    run = run_of()
    for number in range(12):
        ask(run, str(number), text(number))
    assert run.swapping.buffer.used_large > 0
    run.core.scheduler.drop_reserves()
    assert run.swapping.buffer.used_large == 0
    assert audit_pages(run.swapping.buffer) == []


def test_a_journal_replays_to_the_same_copies() -> None:
    journal = Journal()
    run = run_of(120, journal=journal)
    for number in range(24):
        ask(run, str(number), [*text(number % 7), *([number, 1] if number >= 7 else [])])
    assert any(len(plan.fetches) for plan in run.plans)
    again = swapping_core(FULL_AND_SLIDING, LIMITS, 120, keeps_prefixes=True)
    assert replay(journal.entries, again) == run.plans


class CachingMachine(ParkingMachine):
    """Random traffic with prefixes in a buffer that is short, refuses and loses."""

    keeps_prefixes = True

    def fresh(self) -> EngineCore:
        some = self.layout.num_large_pages * 7 + self.limits.max_num_seqs
        return swapping_core(
            self.layout,
            self.limits,
            some % 31,
            AtRandom(some) if some % 3 else Always(),
            make=Losing if some % 2 else Swapping,
            ahead=1 + some % 17,
            keeps_prefixes=True,
        )

    def check_plan(self, plan: StepPlan) -> None:
        swapping = self.engine.core.scheduler.swapping
        assert swapping is not None
        taken = [(group, held) for group, _, held in plan.offloads.tolist()]
        assert len(set(taken)) == len(taken), "two pages go to one place"
        read = {(group, held) for group, held, _ in plan.fetches.tolist()}
        held = {held for some in swapping.buffer.held.values() for held in some}
        draining = set(swapping.buffer.draining)
        assert read <= held | draining, "what is read was given away"
        super().check_plan(plan)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            swapping = self.engine.core.scheduler.swapping
            assert swapping is not None
            swapping.begin()
            assert swapping.buffer.used_large == 0


TestCachingMachine = CachingMachine.TestCase
TestCachingMachine.settings = machine(weight=0.4)
