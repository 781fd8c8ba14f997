"""Prompts that are computed into the CPU buffer: exact, fetched to decode, and none left there."""

from typing import ClassVar

import pytest

from kvell.engine.core.core import MOST_STEPS_PUT_OFF, EngineCore
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.chunks import OffloadedPrompts
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.protocol.messages import Cancel
from kvell.engine.requests.plan import StepPlan
from kvell.vocabulary import RequestId
from tests.depth import machine, search_until_all
from tests.engine.conftest import make_layout, make_submit
from tests.engine.cpu_buffer.machines import Losing, ParkingMachine, Run
from tests.engine.swapping import AtRandom, swapping_core
from tests.engine.traffic import limits, works
from tests.engine.virtual_model import VirtualModel, expected_output

LARGE = 12
MOST_BUFFER = 61
BEYOND = 15
"""The first large page of the buffer: it need not follow the pool's last one."""
SMALL = make_layout((0, 9), LARGE)
OLD = [(3 * i) % 50 for i in range(11)]
LONG = [(7 * i + 1) % 50 for i in range(23)]
SHORT = [5, 6, 7]


def offloaded_of(core: EngineCore) -> OffloadedPrompts:
    offloaded = core.scheduler.offloaded
    assert offloaded is not None
    return offloaded


def started(ahead: int = 200, batched: int = 8) -> Run:
    """Two requests decode; the pool has no room for a third, longer one."""
    core = swapping_core(
        SMALL, limits(batched=batched, seats=4, max_len=40), 200, ahead=ahead, buffer_large=BEYOND
    )
    run = Run(core)
    run.model = VirtualModel(SMALL, buffer=range(BEYOND, BEYOND + 200))
    run.submit("old", OLD, 25)
    run.submit("short", SHORT, 25)
    while len(run.outputs.get("short", ())) < 3:
        run.step()
    return run


def test_a_prompt_without_room_is_computed_into_the_buffer_and_its_decode_is_fetched() -> None:
    run = started()
    run.submit("long", LONG, 9)
    plans = [run.step()]
    while "long" not in run.outputs:
        plans.append(run.step())
    assert offloaded_of(run.core).count == 1
    assert not any(len(plan.offloads) or len(plan.fetches) or plan.parked for plan in plans)
    first_pages = {group: BEYOND * g.pages_per_large for group, g in enumerate(SMALL.groups)}
    handle = next(work.handle for work in plans[0].work if work.request_id == "long")
    given = [row for plan in plans for row in plan.new_pages.tolist() if row[0] == handle]
    assert given and all(page >= first_pages[group] for _, group, _, page in given)
    decodes = [name for plan in plans for name, start, _ in works(plan) if start >= len(OLD)]
    assert "old" in decodes, "decodes go on beside it"
    while "long" not in run.ended:
        plans.append(run.step())
    assert any(len(plan.fetches) for plan in plans)
    run.to_the_end()
    for name, prompt, tokens in (("old", OLD, 25), ("short", SHORT, 25), ("long", LONG, 9)):
        assert run.outputs[name] == expected_output(prompt, tokens), name


def test_one_token_of_an_answer_needs_no_page_of_the_pool() -> None:
    run = started()
    run.submit("long", LONG, 1)
    while "long" not in run.ended:
        run.step()
    assert run.outputs["long"] == expected_output(LONG, 1)
    assert run.core.stats().buffer["in_pages"] == 0
    run.to_the_end()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_prompt_that_is_cancelled_leaves_the_buffer(steps: int) -> None:
    run = started()
    run.submit("long", LONG, 9)
    for _ in range(steps):
        run.step()
    run.core.cancel(Cancel(RequestId("long")))
    run.to_the_end()
    assert not offloaded_of(run.core).parking.sizes.held


def test_a_prompt_in_the_buffer_that_the_device_never_serves_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the only request that is left, and no running one ends in its place."""
    run = started()
    run.submit("long", LONG, 9)
    run.step()
    assert offloaded_of(run.core).count == 1
    for name in ("old", "short"):
        run.core.cancel(Cancel(RequestId(name)))
    monkeypatch.setattr(
        StepMemory, "grant_activations", lambda _memory, _step, tokens, _rows: not tokens
    )
    for _ in range(2 * MOST_STEPS_PUT_OFF):
        run.step()
    finished = run.ended["long"]
    assert (finished.reason, finished.try_later) == ("refused", True)
    assert "the device refused memory" in finished.message
    run.to_the_end()
    assert not offloaded_of(run.core).parking.sizes.held


def test_the_logical_size_decides_whether_it_may() -> None:
    """Algorithm 2 has not grown the buffer: neither this prompt goes there, nor decodes."""
    run = started(ahead=1)
    run.submit("long", LONG, 9)
    run.step()
    assert offloaded_of(run.core).count == 0
    assert not run.core.scheduler.parking.parked  # type: ignore[union-attr]
    run.to_the_end()


def test_what_moves_fewer_bytes_is_done() -> None:
    """The prompt is copied once, parked decodes twice: a large prompt displaces small decodes."""
    run = started()
    offloaded = offloaded_of(run.core)
    swapping = run.swapping
    run.submit("long", LONG, 9)
    long = run.core.scheduler.seats.waiting.first()
    assert long is not None
    prompt_bytes = offloaded.size_bytes(long)
    small = [request for request in run.core.running if request.request_id == "short"]
    assert 2 * swapping.size_bytes(small[0]) < prompt_bytes
    assert not offloaded.pays(long, small)
    assert offloaded.pays(long, small * 9)
    assert offloaded.pays(long, [])
    run.to_the_end()


def test_a_prompt_of_many_chunks_does_not_go_to_a_far_buffer() -> None:
    """Each chunk reads the ones before it over the link."""
    run = started()
    offloaded, swapping = offloaded_of(run.core), run.swapping
    run.submit("long", LONG, 9)
    long = run.core.scheduler.seats.waiting.first()
    assert long is not None
    small = [request for request in run.core.running if request.request_id == "short"]
    just_enough = small * -(-offloaded.size_bytes(long) // (2 * swapping.size_bytes(small[0])))
    assert offloaded.pays(long, just_enough)
    swapping.buffer.is_far = True
    assert not offloaded.pays(long, just_enough)
    assert offloaded.pays(long, [])
    run.to_the_end()


def test_a_request_that_leaves_soon_is_computed_in_the_pool() -> None:
    run = started()
    offloaded_of(run.core).is_leaving = lambda request: True
    run.submit("long", LONG, 9)
    run.to_the_end()
    assert offloaded_of(run.core).count == 0
    assert run.outputs["long"] == expected_output(LONG, 9)


class OffloadingMachine(ParkingMachine):
    """Random traffic, random lateness, a buffer for prompts too that is short and loses pages."""

    prompts_there: ClassVar[int] = 0

    def fresh(self) -> EngineCore:
        some = self.layout.num_large_pages * 7 + self.limits.max_num_seqs
        return swapping_core(
            self.layout,
            self.limits,
            some % MOST_BUFFER,
            AtRandom(some),
            make=Losing if some % 2 else Swapping,
            ahead=1 + some % 47,
            keeps_prefixes=some % 5 == 0,
            buffer_large=self.layout.num_large_pages + 2,
        )

    def make_model(self) -> VirtualModel:
        first = self.layout.num_large_pages + 2
        return VirtualModel(
            self.layout, words=self.chosen.words, buffer=range(first, first + MOST_BUFFER)
        )

    def check_plan(self, plan: StepPlan) -> None:
        self.keeps_prefixes = True
        super().check_plan(plan)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            OffloadingMachine.prompts_there += offloaded_of(self.engine.core).count
            assert not len(self.engine.core.scheduler.seats.offloaded)


@pytest.mark.hypothesis
def test_random_traffic_with_prompts_in_the_buffer() -> None:
    """A deep search goes on until there were some."""
    OffloadingMachine.prompts_there = 0
    search_until_all(
        OffloadingMachine,
        machine(weight=0.4),
        lambda: [] if OffloadingMachine.prompts_there else ["prompts in the buffer"],
    )


def test_a_name_is_free_again_after_its_prompt_was_cancelled_in_the_buffer() -> None:
    run = started()
    run.submit("long", LONG, 9)
    run.step()
    run.core.cancel(Cancel(RequestId("long")))
    run.told.tell(make_submit("long", SHORT, 2))
    run.to_the_end()
    assert run.outputs["long"][-2:] == expected_output(SHORT, 2)
