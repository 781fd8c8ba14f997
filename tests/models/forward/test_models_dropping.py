"""Which tokens of a prompt stay: votes, choice, and the move to the front of the pages."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.quantised import quantise
from kvell.attention.spans import page_views
from kvell.models.config.budgets import OBSERVED_TOKENS
from kvell.models.forward.dropping import (
    POOLED_TOKENS,
    TokenDropping,
    keep_rows,
    kept_positions,
    votes,
)

PAGE_TOKENS, HEADS, SIZE = 4, 2, 8


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_votes_are_attention_summed(softcap: float) -> None:
    query, key = drawn(3, 2, SIZE), drawn(10, SIZE, seed=1)
    params = AttendParams(0.7, softcap=softcap)
    expected = torch.zeros(10)
    for i in range(3):
        for head in range(2):
            scores = 0.7 * key[: 7 + i + 1] @ query[i, head]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            expected[: 7 + i + 1] += scores.softmax(0)
    assert torch.allclose(votes(query, key, params), expected, atol=1e-6)


def test_what_a_sink_takes_is_paid_to_no_token() -> None:
    query, key, sinks = drawn(2, 2, SIZE), drawn(6, SIZE, seed=1), torch.tensor([0.5, 3.0])
    expected = torch.zeros(6)
    for i in range(2):
        for head in range(2):
            scores = torch.cat([key[: 4 + i + 1] @ query[i, head], sinks[head : head + 1]])
            expected[: 4 + i + 1] += scores.softmax(0)[:-1]
    found = votes(query, key, AttendParams(1.0, sinks=sinks))
    assert torch.allclose(found, expected, atol=1e-6)
    assert float(found.sum()) < 4 - 1e-3


def test_votes_of_bfloat16_are_summed_in_float32() -> None:
    query, key = drawn(8, 2, SIZE).bfloat16(), drawn(500, SIZE, seed=1).bfloat16()
    found = votes(query, key, AttendParams(0.3))
    assert found.dtype == torch.float32
    assert torch.equal(found, votes(query.float(), key.float(), AttendParams(0.3)))


def test_the_best_stay_with_their_neighbours_and_all_that_observe() -> None:
    paid = torch.zeros(40)
    paid[20] = 1.0
    kept = kept_positions(paid, OBSERVED_TOKENS + POOLED_TOKENS)
    assert kept.tolist() == [*range(17, 24), *range(32, 40)]


def test_the_earlier_of_equals_stays() -> None:
    kept = kept_positions(torch.ones(30), OBSERVED_TOKENS + 5)
    assert kept.tolist() == [*range(5), *range(22, 30)]


def test_votes_for_those_that_observe_do_not_matter() -> None:
    paid = drawn(50).abs()
    loud = paid.clone()
    loud[-OBSERVED_TOKENS:] = 1e6
    assert torch.equal(kept_positions(paid, 20), kept_positions(loud, 20))


@given(st.integers(0, 1000), st.integers(10, 200), st.data())
def test_choice_is_what_a_list_would_give(seed: int, tokens: int, data: st.DataObject) -> None:
    budget = data.draw(st.integers(OBSERVED_TOKENS + 1, tokens - 1))
    paid = [random.Random(seed + j).choice((0.1, 0.2, 0.5, 0.9)) for j in range(tokens)]
    earlier, reach = tokens - OBSERVED_TOKENS, POOLED_TOKENS // 2
    around = [max(paid[max(0, j - reach) : min(earlier, j + reach + 1)]) for j in range(earlier)]
    best = sorted(range(earlier), key=lambda j: (-around[j], j))[: budget - OBSERVED_TOKENS]
    kept = kept_positions(torch.tensor(paid), budget).tolist()
    assert kept == [*sorted(best), *range(earlier, tokens)]
    assert len(kept) == budget
    assert kept == sorted(set(kept))


def layer_of(dtype: torch.dtype, value_size: int = 0, pages: int = 8) -> LayerPages:
    """Pages with 24 bytes of somebody else's in front of the layer and 40 behind."""
    heads = 1 if value_size else HEADS
    layer = LayerPages(
        torch.zeros(0, dtype=torch.uint8), dtype, 0, 24, PAGE_TOKENS, heads, SIZE, value_size
    )
    stride = 24 + layer.page_bytes + 40
    pool = torch.randint(0, 100, (pages * stride,), dtype=torch.uint8)
    return replace(layer, pool=pool, page_stride_bytes=stride)


def written(layer: LayerPages, pages: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """Random rows for each stored tensor, [heads, tokens, row], written to the pages."""
    rows = []
    for index, view in enumerate(page_views(layer)):
        plain = drawn(layer.kv_heads, tokens, SIZE, seed=index)
        new = quantise(plain, layer.dtype) if layer.quantised else plain.to(layer.dtype)
        for position in range(tokens):
            page = int(pages[position // PAGE_TOKENS])
            view[page, :, position % PAGE_TOKENS] = new[:, position]
        rows.append(new)
    return rows


def read(layer: LayerPages, pages: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    wanted = [(int(pages[i // PAGE_TOKENS]), i % PAGE_TOKENS) for i in range(tokens)]
    return [torch.stack([v[p, :, r] for p, r in wanted], 1) for v in page_views(layer)]


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_size", [0, 6], ids=["heads", "latent"])
def test_kept_rows_come_to_the_front_in_order(dtype: torch.dtype, value_size: int) -> None:
    layer, pages = layer_of(dtype, value_size), torch.tensor([6, 1, 3, 0, 5], dtype=torch.int32)
    rows = written(layer, pages, 18)
    before = layer.pool.clone()
    kept = torch.tensor([[0, 2, 3, 9, 16, 17], [1, 4, 5, 11, 12, 17]])[: layer.kv_heads]
    keep_rows(layer, pages, kept)
    for found, old in zip(read(layer, pages, 6), rows, strict=True):
        for head in range(layer.kv_heads):
            assert torch.equal(found[head], old[head, kept[head]])
    changed = (layer.pool != before).nonzero()[:, 0] // layer.page_stride_bytes
    assert set(changed.tolist()) <= {6, 1}, "six rows: two pages, and no byte of others"
    inside = (layer.pool != before).nonzero()[:, 0] % layer.page_stride_bytes
    assert int(inside.min()) >= 24
    assert int(inside.max()) < 24 + layer.page_bytes


def group_of(contexts: list[int], counts: list[int], pages: list[list[int]]) -> GroupBatch:
    def starts(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)

    flat = torch.tensor([page for own in pages for page in own], dtype=torch.int32)
    unused = torch.zeros(0, dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    table_starts = starts([len(own) for own in pages])
    first = torch.zeros(len(contexts), dtype=torch.int32)
    return GroupBatch(starts(counts), lengths, table_starts, flat, first, unused, unused)


def test_a_step_drops_only_of_prompts_that_end_and_are_too_long() -> None:
    """Of four requests, the first decodes, the third is short, the last one's prompt goes on."""
    layer = layer_of(torch.float32, pages=20)
    tables = [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15]]
    contexts, counts = [16, 19, 11, 16], [1, 12, 11, 16]
    rows = [written(layer, torch.tensor(t), n) for t, n in zip(tables, contexts, strict=True)]
    query = drawn(sum(counts), 2 * HEADS, SIZE, seed=9)
    params = AttendParams(0.35)
    dropping = TokenDropping([1, 2])
    before = layer.pool.clone()
    dropping.choose(11, layer, group_of(contexts, counts, tables), query, params)
    assert torch.equal(layer.pool, before), "nothing moves while layers attend"
    dropping.move()
    observing = query[13 - OBSERVED_TOKENS : 13]
    for head in range(HEADS):
        paid = votes(observing[:, 2 * head : 2 * head + 2], rows[1][0][head], params)
        kept = kept_positions(paid, 11)
        for found, old in zip(read(layer, torch.tensor(tables[1]), 11), rows[1], strict=True):
            assert torch.equal(found[head], old[head, kept])
    for index in (0, 2, 3):
        table = torch.tensor(tables[index])
        for found, old in zip(read(layer, table, contexts[index]), rows[index], strict=True):
            assert torch.equal(found, old)


def test_sinks_are_those_of_each_heads_own_queries() -> None:
    layer, table = layer_of(torch.float32), [[0, 1, 2, 3, 4]]
    rows = written(layer, torch.tensor(table[0]), 20)
    query, sinks = 4 * drawn(20, 2 * HEADS, SIZE), torch.tensor([-9.0, 6.0, 8.0, -9.0])
    dropping = TokenDropping([0])
    params = AttendParams(1.0, sinks=sinks)
    dropping.choose(11, layer, group_of([20], [20], table), query, params)
    dropping.move()
    found = read(layer, torch.tensor(table[0]), 11)[0]
    for head in range(HEADS):
        own = slice(2 * head, 2 * head + 2)
        paid = votes(query[12:, own], rows[0][head], AttendParams(1.0, sinks=sinks[own]))
        assert torch.equal(found[head], rows[0][head, kept_positions(paid, 11)])
