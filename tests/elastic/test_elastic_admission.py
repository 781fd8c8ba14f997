"""Algorithm 1: decodes first, then prefills while all fits, with θ left; nothing half."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvell.elastic.admission import (
    Admission,
    Chunk,
    Decode,
    Prefill,
    StepMemory,
    Supply,
    admit,
    threshold_chunks,
)
from kvell.elastic.arena import ActivationModel

MEMORY = StepMemory(ActivationModel(0, 1, 0), 1)
"""A chunk of activations for every token."""


def prefill(request: int, tokens: int, *, per_token: int = 1, staging: int = 0) -> Prefill:
    return Prefill(request, tokens, lambda n: n * per_token, staging)


def test_decodes_come_first_and_stop_at_the_first_that_does_not_fit() -> None:
    supply = Supply(kv_chunks=4, activation_chunks=3)
    got = admit([Decode(1, 1), Decode(2, 1, 2), Decode(3, 1)], [prefill(9, 1)], supply, MEMORY)
    assert got.decodes == (1, 2) and got.prefills == ()
    assert (got.kv_chunks, got.activation_chunks, got.fetched_chunks) == (4, 2, 2)


def test_kv_and_activations_are_granted_together() -> None:
    supply = Supply(kv_chunks=5, activation_chunks=0)
    got = admit([], [prefill(1, 3)], supply, MEMORY)
    assert got.prefills == (Chunk(1, 2),), "two tokens need two chunks of each"
    assert got.kv_chunks + got.activation_chunks <= supply.total_chunks


def test_the_threshold_is_left() -> None:
    assert threshold_chunks(3, 250) == 3 + 3
    supply = Supply(kv_chunks=6, activation_chunks=0, threshold_chunks=2)
    assert admit([], [prefill(1, 3)], supply, MEMORY).prefills == (Chunk(1, 2),)


def test_a_prefill_that_fits_only_without_its_kv_is_streamed_out() -> None:
    supply = Supply(kv_chunks=2, activation_chunks=3, buffer_chunks=6)
    both = [prefill(1, 4, staging=1), prefill(2, 3)]
    got = admit([], both, supply, MEMORY)
    assert got.prefills == (Chunk(1, 4, offloaded=True),)
    assert (got.kv_chunks, got.offloaded_chunks) == (1, 4)
    full = admit([], both, replace(supply, buffer_chunks=3), MEMORY)
    assert full.prefills == (Chunk(1, 2),), "the buffer has no room for all of it"


def test_what_is_behind_a_prefill_that_was_cut_waits() -> None:
    supply = Supply(kv_chunks=5, activation_chunks=0)
    got = admit([], [prefill(1, 9), prefill(2, 1, per_token=0)], supply, MEMORY)
    assert [chunk.request for chunk in got.prefills] == [1]


def test_a_chunk_of_too_few_tokens_is_no_step() -> None:
    supply = Supply(kv_chunks=5, activation_chunks=0)
    assert admit([], [prefill(1, 9)], supply, MEMORY, min_tokens=4) == Admission()
    assert admit([], [prefill(1, 2)], supply, MEMORY, min_tokens=4).prefills == (Chunk(1, 2),)


def test_the_balloon_moves_what_the_other_side_has_to_spare() -> None:
    inflated = admit([Decode(1, 5)], [], Supply(kv_chunks=2, activation_chunks=8), MEMORY)
    assert inflated.inflation_chunks == 3
    scarce = admit([Decode(1, 7)], [], Supply(2, 3, reclaimable_chunks=4), MEMORY)
    assert scarce.inflation_chunks == 2, "one chunk stays for the token; the rest is evicted"
    deflated = admit([], [prefill(1, 4)], Supply(kv_chunks=9, activation_chunks=1), MEMORY)
    assert deflated.inflation_chunks == -3
    assert admit([Decode(1, 1)], [], Supply(4, 4), MEMORY).inflation_chunks == 0


chunks = st.integers(0, 12)
decodes = st.lists(st.builds(Decode, st.integers(0, 99), chunks, chunks), max_size=5)
prefills = st.lists(
    st.builds(prefill, st.integers(0, 99), st.integers(1, 30), per_token=st.integers(0, 3)),
    max_size=5,
)
supplies = st.builds(Supply, *[st.integers(0, 40)] * 4, st.integers(0, 6))
models = st.builds(ActivationModel, *[st.integers(0, 9)] * 3)


@given(decodes, prefills, supplies, models, st.integers(1, 4))
def test_never_more_than_there_is_and_nobody_is_passed_over(
    running: list[Decode], waiting: list[Prefill], supply: Supply, model: ActivationModel, size: int
) -> None:
    memory = StepMemory(model, size)
    got = admit(running, waiting, supply, memory)
    tokens = len(got.decodes) + sum(chunk.tokens for chunk in got.prefills)
    rows = len(got.decodes) + len(got.prefills)
    assert got.activation_chunks == memory.chunks(tokens, rows)
    if tokens:
        needed = got.kv_chunks + got.activation_chunks + supply.threshold_chunks
        assert needed <= supply.total_chunks
    assert got.offloaded_chunks <= supply.buffer_chunks
    assert list(got.decodes) == [d.request for d in running[: len(got.decodes)]]
    assert [c.request for c in got.prefills] == [p.request for p in waiting[: len(got.prefills)]]
    if len(got.decodes) < len(running):
        assert not got.prefills
    for chunk, asked in zip(got.prefills[:-1], waiting, strict=False):
        assert chunk.tokens == asked.tokens
    if got.inflation_chunks > 0:
        assert supply.activation_chunks - got.inflation_chunks >= got.activation_chunks
    if got.inflation_chunks < 0:
        assert supply.activation_chunks - got.inflation_chunks == got.activation_chunks
