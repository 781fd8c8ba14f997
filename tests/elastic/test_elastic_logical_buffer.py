"""Algorithm 2: halve on late tokens, double on late first tokens, three of five, then anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.elastic.logical_buffer import CpuBuffer, scale
from tests.elastic.buffer_audit import audit_buffer


def late(buffer: CpuBuffer, pattern: str) -> list[int]:
    """Iterations: f first token late, t token late, b both, . none; the size after each."""
    sizes = []
    for each in pattern:
        buffer.note_iteration(ttft_late=each in "fb", tpot_late=each in "tb")
        sizes.append(buffer.logical_chunks)
    return sizes


@pytest.mark.parametrize(
    ("logical", "ttft", "tpot", "expected"),
    [
        (8, True, False, 16),
        (8, False, True, 4),
        (8, True, True, 4),
        (8, False, False, 8),
        (1, False, True, 1),
        (12, True, False, 20),
        (20, True, False, 20),
        (5, False, True, 2),
    ],
)
def test_algorithm_2_by_hand(logical: int, ttft: bool, tpot: bool, expected: int) -> None:
    assert scale(logical, 20, ttft=ttft, tpot=tpot) == expected


def test_it_starts_at_one_chunk_and_three_late_of_five_double_it() -> None:
    assert late(CpuBuffer(16), "f.f.f") == [1, 1, 1, 1, 2]
    assert late(CpuBuffer(16), "f..f.f.") == [1] * 7, "never three within five"


def test_after_a_change_the_window_starts_anew() -> None:
    assert late(CpuBuffer(16), "fffffffff") == [1, 1, 2, 2, 2, 4, 4, 4, 8]


def test_it_grows_to_the_physical_size_and_no_further() -> None:
    assert late(CpuBuffer(3), "f" * 12)[-1] == 3


def test_late_tokens_win_over_late_first_tokens() -> None:
    buffer = CpuBuffer(64, 32)
    assert late(buffer, "bbb") == [32, 32, 16]
    assert late(buffer, "fftttf") == [16, 16, 16, 16, 8, 8]


def test_a_smaller_size_refuses_and_never_evicts() -> None:
    buffer = CpuBuffer(8, 8)
    assert buffer.hold(1, 6)
    late(buffer, "ttt")
    assert (buffer.logical_chunks, buffer.held_chunks, buffer.free_chunks) == (4, 6, 0)
    assert not buffer.hold(2, 1)
    assert buffer.release(1) == 6
    assert buffer.hold(2, 4) and not buffer.hold(2, 1)
    assert audit_buffer(buffer) == []


def test_a_fixed_size_stays_and_no_buffer_holds_nothing() -> None:
    fixed = CpuBuffer(8, 5, is_fixed=True)
    late(fixed, "fffttt")
    assert fixed.logical_chunks == 5
    none = CpuBuffer(0)
    late(none, "fff")
    assert (none.logical_chunks, none.free_chunks) == (0, 0)
    assert not none.hold(1, 1) and none.hold(1, 0)
    assert none.release(1) == 0


@given(st.integers(1, 40), st.text("ftb.", max_size=60), st.data())
def test_the_size_stays_in_bounds_and_moves_by_alpha(
    physical: int, pattern: str, data: st.DataObject
) -> None:
    buffer = CpuBuffer(physical)
    for each in pattern:
        before = buffer.logical_chunks
        (after,) = late(buffer, each)
        assert after in (before, max(1, before // 2), min(physical, 2 * before))
        buffer.hold(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4)))
        if data.draw(st.booleans()):
            buffer.release(data.draw(st.integers(0, 3)))
        assert audit_buffer(buffer) == []


def test_it_grows_to_what_was_refused_at_once() -> None:
    buffer = CpuBuffer(64)
    buffer.note_refused(10)
    assert late(buffer, "fff") == [1, 1, 10]
    assert late(buffer, "fff") == [10, 10, 20], "a refusal is forgotten with the change"
    assert buffer.hold(1, 12)
    buffer.note_refused(60)
    assert late(buffer, "fff")[-1] == 64, "no further than there is memory"
    buffer.note_refused(60)
    assert late(buffer, "ttt")[-1] == 32, "late tokens win over it"


def test_what_is_in_the_buffer_already_is_held_whatever_the_size() -> None:
    buffer = CpuBuffer(8, 2)
    assert not buffer.hold(1, 5)
    assert buffer.hold(1, 5, whatever_size=True)
    assert (buffer.held_chunks, buffer.free_chunks) == (5, 0)
    assert buffer.release(1) == 5
