"""Generators: seeded, sorted, and of the lengths that they are named for."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvell.errors import ChangeSomething
from kvell.simulator.generators import ARTICLE_MEAN_TOKENS, GENERATORS, generate_trace
from kvell.simulator.trace import TraceRow, ideal_hit_rate, read_trace, write_trace


def plain(rows: list[TraceRow]) -> list[tuple[object, ...]]:
    return [
        (r.arrival_s, r.prompt_tokens, r.output_tokens, r.block_ids.tobytes(), r.session)
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
    sessions: dict[str | None, list[TraceRow]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    followed = [turns for turns in sessions.values() if len(turns) > 1]
    assert len(followed) > 10
    for turns in followed:
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            shared = len(before.block_ids)
            assert np.array_equal(after.block_ids[:shared], before.block_ids)


def test_articles_have_the_papers_mean_and_several_questions() -> None:
    rows = generate_trace("arxiv-qa", 500)
    assert abs(np.mean([r.prompt_tokens for r in rows]) - ARTICLE_MEAN_TOKENS) < 50
    assert max(r.prompt_tokens for r in rows) < 131_072
    assert set(Counter(int(r.block_ids[0]) for r in rows).values()) == {5}
    assert ideal_hit_rate(rows) > 0.75


def test_exams_stay_below_the_papers_longest() -> None:
    rows = generate_trace("mmlu-pro", 2_000)
    assert 2_500 < max(r.prompt_tokens for r in rows) <= 3_076
    assert len({int(r.block_ids[0]) for r in rows}) == 14


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
    # The last family may be cut by the count.
    assert sorted(users.values())[1] >= 2
    assert set(users.values()) >= {2, 3, 4, 5, 6}
    lengths = [len(r.block_ids) for r in rows]
    assert min(lengths) < 200
    assert 15_800 < max(lengths) <= 16_000
    assert abs(np.mean(lengths) - 8_000) < 700


def test_unknown_name() -> None:
    with pytest.raises(ChangeSomething, match="use chat"):
        generate_trace("chats")
