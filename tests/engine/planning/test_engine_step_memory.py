"""One pool for KV and activations: right answers, no partial grants, no request hangs."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.device.chunks import AddressRange, Ints
from kvell.elastic.arena import ActivationModel
from kvell.engine.core.core import MOST_STEPS_PUT_OFF
from kvell.errors import TryLater
from kvell.memory import Layout
from kvell.vocabulary import StepNumber
from tests.depth import few
from tests.device.fake_chunks import FakeChunks
from tests.engine.planning.shared_traffic import CHUNK_BYTES, Shared, full, longest
from tests.engine.traffic import Traffic, limits
from tests.pages.pools import group, pool_of


def fake(traffic: Shared) -> FakeChunks:
    assert isinstance(traffic.device, FakeChunks)
    return traffic.device


def test_a_prefill_takes_what_kv_has_to_spare_and_decodes_give_it_back() -> None:
    traffic = Shared(full(20), limits(batched=32), ActivationModel(0, 128, 0))
    traffic.submit("a", range(32), max_tokens=12)
    assert traffic.step() == [("a", 0, 32)]
    assert traffic.elastic.balloon.activation_chunks == 16
    for index in range(7):
        traffic.submit(f"b{index}", [index, *range(30)], max_tokens=12)
    traffic.run()
    assert traffic.rung("inflate") > 0 and traffic.rung("deflate") > 0
    assert traffic.core.max_running > 4, "more than fit beside the largest step's reserve"


def test_more_run_at_once_than_beside_a_reserve_for_the_largest_step() -> None:
    model = ActivationModel(0, 128, 0)
    shared = Shared(full(24), limits(batched=32), model)
    reserve = model.need_bytes(32, 8) // 256
    rigid = Traffic(full(24 - reserve), limits(batched=32))
    for traffic in (shared, rigid):
        for index in range(8):
            traffic.submit(str(index), [index, *range(20)], max_tokens=20)
        traffic.run()
    assert shared.core.max_running >= 1.5 * rigid.core.max_running


def test_a_chunk_is_as_large_as_kv_and_activations_both_allow() -> None:
    traffic = Shared(full(6), limits(batched=32), ActivationModel(0, 64, 0))
    traffic.submit("a", range(30), max_tokens=2)
    works = traffic.step()
    assert 4 <= works[0][2] < 30
    assert traffic.rung("shrink_chunk") == 1
    traffic.run()


def test_with_idle_activations_and_a_full_cache_a_prefill_evicts_nothing() -> None:
    """What was cached beside the largest step's activations is still hit later."""
    traffic = Shared(full(20), limits(batched=32), ActivationModel(0, 64, 0))
    traffic.submit("large", [40] * 32, max_tokens=1)
    traffic.run()
    left = 20 - traffic.elastic.balloon.activation_chunks
    for letter in range(12):
        traffic.submit(str(letter), [letter] * 15, max_tokens=1)
        traffic.run()
    totals = traffic.core.memory.totals()
    assert sum(totals.cached_pages) > 4 * left, "more is cached than lay beside them at first"
    assert traffic.elastic.counts.inflated > 0
    assert totals.evicted_pages == (0,)
    for letter in range(12):
        traffic.submit(f"again {letter}", [letter] * 15, max_tokens=1)
        traffic.run()
        assert traffic.finished(f"again {letter}").cached_tokens >= 12


def test_what_the_device_refuses_waits_for_the_next_step() -> None:
    traffic = Shared(full(8), limits(batched=32), ActivationModel(0, 16, 0))
    traffic.submit("a", range(8))
    fake(traffic).fail("map")
    assert traffic.step() == []
    assert traffic.rung("refused_by_device") == 1
    assert traffic.step() == [("a", 0, 8)]
    traffic.run()


def test_decodes_go_on_in_a_mapped_slot_while_a_prefill_is_refused_more() -> None:
    traffic = Shared(full(20), limits(batched=32), ActivationModel(0, 128, 0))
    traffic.submit("a", range(2), max_tokens=12)
    traffic.step()
    traffic.submit("b", range(20, 44), max_tokens=4)
    fake(traffic).fail("map")
    assert traffic.step() == [("a", 2, 1)], "b has its pages and no slot that is large enough"
    assert traffic.step() == [("a", 3, 1), ("b", 0, 24)]
    traffic.run()


class Refusing(FakeChunks):
    def map(self, area: AddressRange, positions: Ints, chunks: Ints) -> None:
        raise TryLater("device: never")


def test_a_request_that_never_gets_memory_is_refused_with_a_reason() -> None:
    traffic = Shared(full(8), limits(batched=32), ActivationModel(0, 16, 0), device=Refusing)
    for name in ("a", "b"):
        traffic.submit(name, range(8))
    traffic.run(3 * MOST_STEPS_PUT_OFF)
    for name in ("a", "b"):
        finished = traffic.finished(name)
        assert (finished.reason, finished.try_later) == ("refused", True)
        assert "the device refused memory for 64 steps" in finished.message
    assert not any(traffic.core.memory.snapshot().used)


def test_memory_that_comes_later_is_used_when_it_has_come() -> None:
    traffic = Shared(full(20), limits(batched=32), ActivationModel(0, 16, 0), committed=6)
    for index in range(6):
        traffic.submit(str(index), [index] * 14, max_tokens=10)
    for _ in range(3):
        traffic.step()
    running = len(traffic.core.running)
    assert traffic.shared.figures()["cold_chunks"] == 14
    traffic.core.step_memory.warm(9)
    traffic.core.step_memory.warm(9)
    assert traffic.shared.figures()["cold_chunks"] == 0
    traffic.step()
    assert len(traffic.core.running) > running
    traffic.run()


def test_who_waits_for_memory_that_still_comes_does_not_run_alone_for_it() -> None:
    traffic = Shared(full(20), limits(batched=32), ActivationModel(0, 16, 0), committed=2)
    for index in range(3):
        traffic.submit(str(index), [index] * 30, max_tokens=10)
    assert traffic.step() == []
    traffic.core.step_memory.warm(18)
    traffic.step()
    traffic.step()
    assert len(traffic.core.running) > 1
    traffic.run()


def test_where_no_more_memory_comes_a_request_has_what_there_is_to_itself() -> None:
    """Otherwise the cached prefix that it could reuse would hold the pages that it needs."""
    traffic = Shared(full(20), limits(batched=32), ActivationModel(0, 16, 0), committed=9)
    for index in range(3):
        traffic.submit(str(index), [index] * 30, max_tokens=10)
        traffic.step()
    said = [traffic.shared.is_complete]
    traffic.core.step_memory.warm(0)
    assert [*said, traffic.shared.is_complete] == [False, True]
    assert traffic.shared.figures()["cold_chunks"] == 11
    traffic.run()


def test_draft_tokens_take_no_chunk_that_kv_has() -> None:
    """A decode of one token needs one chunk here, and each draft token half of one."""
    traffic = Shared(full(20), limits(), ActivationModel(CHUNK_BYTES // 2, CHUNK_BYTES // 2, 0))
    assert traffic.elastic.balloon.idle_chunks == 0
    assert traffic.shared.most_draft_tokens(3, 1, 1) == 0
    assert traffic.shared.most_draft_tokens(3, 2, 2) == 1, (
        "the rest of a chunk that it needs anyway"
    )
    traffic.elastic.ensure(3)
    assert traffic.shared.most_draft_tokens(3, 1, 1) == 3


layouts = st.sampled_from(
    [
        full(14),
        pool_of(9, group(4, 2), group(2, 3, window=9)),
        pool_of(24, group(4, 1)),
    ]
)
models = st.builds(ActivationModel, st.integers(0, 300), st.integers(1, 60), st.integers(0, 200))
prompts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8
)


@few()
@given(layouts, models, prompts, st.sampled_from([64, 256, 600]), st.sampled_from([5, 16, 32]))
def test_whatever_comes_is_answered_right_and_the_pool_ends_empty(
    layout: Layout,
    model: ActivationModel,
    wanted: list[tuple[int, int, int]],
    chunk_bytes: int,
    batched: int,
) -> None:
    most = longest(layout, model, chunk_bytes)
    chosen = limits(batched=max(batched, 8), max_len=most)
    traffic = Shared(layout, chosen, model, chunk_bytes)
    for index, (letter, length, output) in enumerate(wanted):
        traffic.submit(str(index), [letter] * min(length, most - 1), output)
    traffic.run(800)
    assert not any(traffic.core.memory.snapshot().used)
    traffic.shared.begin(StepNumber(traffic.core.step + 1), traffic.core.step)
    assert traffic.elastic.balloon.idle_chunks == traffic.elastic.balloon.activation_chunks
