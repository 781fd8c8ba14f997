"""What heartbeats say about memory that requests wait for, or will need."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.statistics import LoadStats
from tests.engine.conftest import make_layout
from tests.engine.traffic import Traffic, limits

LAYOUT = make_layout((0,), 10)
"""Ten pages of four tokens."""
TOKEN_BYTES = LAYOUT.groups[0].page_stride_bytes // LAYOUT.groups[0].page_tokens


def text(number: int, length: int) -> list[int]:
    return [(number * 11 + i * (number + 3)) % 49 for i in range(length)]


def load(traffic: Traffic) -> LoadStats:
    return traffic.core.counters.load_stats(traffic.core.step)


def test_who_waits_for_memory_is_told_apart_from_who_waits_for_a_seat() -> None:
    memory, seats = Traffic(LAYOUT, limits()), Traffic(LAYOUT, limits(seats=1))
    for traffic, length in ((memory, 24), (seats, 8)):
        for number in range(3):
            traffic.submit(f"q{number}", text(number, length), max_tokens=4)
        traffic.step()
    assert (load(memory).waiting, load(memory).memory_waiting) == (2, 2)
    assert (load(seats).waiting, load(seats).memory_waiting) == (2, 0)
    assert load(memory).head_tokens == 24 and load(memory).head_bytes == 24 * TOKEN_BYTES
    assert load(memory).answer_tokens == 4
    for traffic in (memory, seats):
        traffic.run()
        idle = load(traffic)
        assert (idle.memory_waiting, idle.head_tokens, idle.head_bytes) == (0, 0, 0)


def test_memory_admits_no_more_than_there_are_seats_for() -> None:
    traffic = Traffic(LAYOUT, limits(seats=2))
    for number in range(4):
        traffic.submit(f"q{number}", text(number, 24), max_tokens=4)
    traffic.step()
    assert (load(traffic).waiting, load(traffic).memory_waiting) == (3, 1)


def test_who_waits_for_the_next_step_does_not_wait_for_memory() -> None:
    traffic = Traffic(make_layout((0,), 40), limits(batched=8))
    for number in range(3):
        traffic.submit(f"q{number}", text(number, 16), max_tokens=4)
    traffic.step()
    assert (load(traffic).waiting, load(traffic).memory_waiting) == (2, 0)


def test_a_prompt_in_chunks_and_its_answer_will_grow() -> None:
    traffic = Traffic(make_layout((0,), 40), limits(batched=8))
    traffic.submit("q", text(1, 20), max_tokens=6)
    traffic.step()
    assert load(traffic).growth_bytes == (12 + 6) * TOKEN_BYTES
    traffic.run()
    assert load(traffic).growth_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(2, 12)), min_size=1, max_size=6))
def test_growth_is_the_most_that_all_take_at_any_time(sizes: list[tuple[int, int]]) -> None:
    """Step by step, with answers of the lengths that were asked for."""
    traffic = Traffic(make_layout((0,), 200), limits(batched=200))
    for number, (prompt, answer) in enumerate(sizes):
        traffic.submit(f"q{number}", text(number, prompt), max_tokens=answer)
    traffic.step()  # all prompts are computed
    running = [(prompt, answer - 1) for prompt, answer in sizes]
    most = max(
        [
            sum(1 + step if step <= left else -prompt for prompt, left in running)
            for step in range(1, 1 + max(left for _, left in running))
        ],
        default=0,
    )
    assert load(traffic).growth_bytes == max(0, most) * TOKEN_BYTES


def test_windows_do_not_grow() -> None:
    traffic = Traffic(make_layout((9,), 40), limits())
    traffic.submit("q", text(1, 20), max_tokens=20)
    traffic.step()
    assert load(traffic).running == 1 and load(traffic).growth_bytes == 0
