"""Generators: seeded, sorted, and of the lengths that they are named for."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvell.errors import ChangeSomething
from kvell.simulator.traces.generators import ARTICLE_MEAN_TOKENS, GENERATORS, generate_trace
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import (
    TraceRow,
    ideal_hit_tokens,
    place,
    predecessors,
)
from kvell.simulator.traces.trace import read_trace, write_trace


def plain(rows: list[TraceRow]) -> list[tuple[object, ...]]:
    return [
        (
            *(r.arrival_s, r.prompt_tokens, r.output_tokens, r.block_ids.tobytes()),
            *(r.session, r.images, r.continues),
        )
        for r in rows
    ]


@pytest.mark.parametrize("name", GENERATORS)
class TestEvery:
    def test_seed_decides(self, name: str) -> None:
        once, again = generate_trace(name, 40, seed=3), generate_trace(name, 40, seed=3)
        assert plain(once) == plain(again)
        assert plain(once) != plain(generate_trace(name, 40, seed=4))

    def test_count_and_order(self, name: str) -> None:
        rows = generate_trace(name, 40)
        assert len(rows) == 40
        assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))
        assert len(generate_trace(name)) == GENERATORS[name].usual_count

    def test_is_a_valid_trace(self, name: str, tmp_path: Path) -> None:
        rows = generate_trace(name, 20)
        write_trace(tmp_path / "t.jsonl", rows)
        assert plain(read_trace(tmp_path / "t.jsonl")) == plain(rows)


def test_chat_goes_on_from_what_was_said() -> None:
    rows = generate_trace("chat", 300)
    followed = 0
    for row, before in zip(rows, predecessors(rows), strict=True):
        assert row.continues == (before is not None)
        assert (len(row.block_ids) == 0) == row.continues
        if before is not None:
            followed += 1
            assert row.prompt_tokens > rows[before].num_tokens
    assert followed > 200


def test_chat_as_its_docstring_says() -> None:
    rows = generate_trace("chat")
    prompts = [r.prompt_tokens for r in rows]
    assert (round(np.mean(prompts)), min(prompts), max(prompts)) == (1_621, 139, 7_416)
    assert round(np.mean([r.output_tokens for r in rows])) == 198
    assert abs(ideal_hit_tokens(rows) / sum(prompts) - 0.90) < 0.01


def test_articles_have_the_papers_mean_and_several_questions() -> None:
    rows = generate_trace("arxiv-qa", 500)
    assert abs(np.mean([r.prompt_tokens for r in rows]) - ARTICLE_MEAN_TOKENS) < 50
    assert max(r.prompt_tokens for r in rows) < 131_072
    assert set(Counter(int(r.block_ids[0]) for r in rows).values()) == {5}
    assert ideal_hit_tokens(rows) > 0.75 * sum(r.prompt_tokens for r in rows)


def test_articles_as_their_docstring_says() -> None:
    rows = generate_trace("arxiv-qa")
    prompts = [r.prompt_tokens for r in rows]
    assert (min(prompts), max(prompts)) == (58_730, 121_462)
    assert abs(np.mean(prompts) - ARTICLE_MEAN_TOKENS) < 1
    assert abs(ideal_hit_tokens(rows) / sum(prompts) - 0.80) < 0.01


def test_exams_stay_below_the_papers_longest() -> None:
    rows = generate_trace("mmlu-pro", 2_000)
    assert 2_500 < max(r.prompt_tokens for r in rows) <= 3_076
    assert len({int(r.block_ids[0]) for r in rows}) == 14


def test_exams_as_their_docstring_says() -> None:
    rows = generate_trace("mmlu-pro")
    prompts = [r.prompt_tokens for r in rows]
    assert (min(prompts), max(prompts), round(np.mean(prompts))) == (703, 2_748, 1_459)
    assert abs(ideal_hit_tokens(rows) / sum(prompts) - 0.83) < 0.01


def test_image_questions_have_the_papers_lengths() -> None:
    rows = generate_trace("mmmu-pro", 400)
    assert {r.prompt_tokens for r in rows} == {43}
    assert {(len(r.images), r.images[0].tokens, r.images[0].start) for r in rows} == {(1, 6_193, 0)}
    assert {place(r, True).prompt_tokens for r in rows} == {6_193 + 43}
    assert max(r.output_tokens for r in rows) <= 64
    uses = Counter(r.images[0].id for r in rows)
    assert sorted(uses) == list(range(len(uses)))
    assert 20 < len(rows) - len(uses) < 65


def test_image_questions_share_their_images_tokens_only() -> None:
    rows = generate_trace("mmmu-pro", 100)
    prompts = PromptMaker(rows)
    of = [r.images[0].id for r in rows]
    again = next(i for i, image in enumerate(of) if image in of[:i])
    first, second = prompts.prompt(of.index(of[again])), prompts.prompt(again)
    assert np.array_equal(first[:6_193], second[:6_193])
    assert first[6_193] != second[6_193]


@pytest.mark.parametrize("name", ["ministral-static", "ministral-dynamic"])
def test_ministral_lengths(name: str) -> None:
    rows = generate_trace(name, 400)
    lengths = [r.prompt_tokens for r in rows]
    assert 55_000 <= min(lengths) < 57_000
    assert 108_000 < max(lengths) <= 110_000
    assert {r.arrival_s for r in rows} == {0.0}
    assert all(50 <= r.output_tokens <= 100 for r in rows)


def test_dynamic_lengths_grow() -> None:
    def halves(name: str) -> float:
        lengths = [r.prompt_tokens for r in generate_trace(name, 400)]
        return float(np.mean(lengths[200:]) / np.mean(lengths[:200]))

    assert halves("ministral-dynamic") > 1.3
    assert 0.95 < halves("ministral-static") < 1.05


def test_documents_span_their_range() -> None:
    lengths = [r.prompt_tokens for r in generate_trace("long-documents", 1_000)]
    assert 8_192 <= min(lengths) < 9_000
    assert 120_000 < max(lengths) <= 131_072
    assert 30_000 < np.median(lengths) < 36_000


def test_tree_prefixes_are_shared_by_two_to_six() -> None:
    rows = generate_trace("tree", 3_000)
    users = Counter(int(r.block_ids[0]) for r in rows)
    assert set(users.values()) == {2, 3, 4, 5, 6}
    lengths = [len(r.block_ids) for r in rows]
    assert min(lengths) < 200
    assert 15_800 < max(lengths) <= 16_000
    assert abs(np.mean(lengths) - 8_000) < 700


def test_tree_prefixes_end_anywhere_and_lie_in_any_order() -> None:
    rows = generate_trace("tree", 3_000)
    assert {r.block_tokens for r in rows} == {1}
    ends = Counter(len(r.block_ids) % 16 for r in rows)
    assert len(ends) == 16
    assert max(ends.values()) < 0.12 * len(rows)
    firsts = [int(r.block_ids[0]) for r in rows]
    assert sum(a == b for a, b in pairwise(firsts)) < 20


@pytest.mark.parametrize("count", range(2, 30))
@pytest.mark.parametrize("seed", range(3))
def test_no_tree_prefix_is_used_once(count: int, seed: int) -> None:
    users = Counter(int(r.block_ids[0]) for r in generate_trace("tree", count, seed))
    assert users.total() == count
    assert 2 <= min(users.values()) <= max(users.values()) <= 6


def test_tree_hits_are_every_prefix_but_at_its_first_use() -> None:
    rows = generate_trace("tree")
    lengths = {int(r.block_ids[0]): len(r.block_ids) for r in rows}
    ideal = sum(len(r.block_ids) for r in rows) - sum(lengths.values())
    assert ideal_hit_tokens(rows) == ideal
    assert abs(ideal / sum(r.prompt_tokens for r in rows) - 0.73) < 0.01


def test_unknown_name() -> None:
    with pytest.raises(ChangeSomething, match="use chat"):
        generate_trace("chats")
