"""Workloads after papers: their statistics match the papers' figures and words."""

from itertools import pairwise

import numpy as np
import pytest

from kvell.simulator.traces.generators import GENERATORS, generate_trace
from kvell.simulator.traces.lengths import INFINITE_LLM, ContextLengths
from kvell.simulator.traces.published import PUBLISHED, Statistics, statistics
from kvell.simulator.traces.rows import TraceRow, predecessors
from kvell.simulator.traces.sessions import (
    CHAT_TOKENS,
    DOCUMENT_TOKENS,
    EXAMPLES_TOKENS,
    QUESTIONS_PER_DOCUMENT,
)


def of(name: str, count: int | None = None, seed: int = 0) -> Statistics:
    return statistics(generate_trace(name, count, seed))


def test_every_published_one_is_a_generator() -> None:
    assert PUBLISHED.keys() <= GENERATORS.keys()
    assert len(PUBLISHED) == 3 + 3 + len(INFINITE_LLM)
    assert all(one.source and one.says for one in PUBLISHED.values())


class TestStatistics:
    ROWS = (
        TraceRow(0.0, 10, 5, session="s"),
        TraceRow(1.0, 20, 5, session="s", continues=True),
        TraceRow(2.0, 6, 2),
    )

    def test_by_hand(self) -> None:
        assert statistics(self.ROWS) == Statistics(
            requests=3,
            sessions=2,
            asked_tokens_mean=(10 + 5 + 6) / 3,
            prompt_tokens_mean=12.0,
            output_tokens_mean=4.0,
            prompt_per_output=3.0,
            shared_share=14 / 36,
            context_tokens_mean=16.0,
            context_tokens_deviation=float(np.std([15, 25, 8])),
            context_tokens_max=25.0,
        )


class TestShareGpt:
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_published_means(self, seed: int) -> None:
        found, printed = of("sharegpt-like", 4_000, seed), PUBLISHED["sharegpt-like"].figures
        assert found.asked_tokens_mean == pytest.approx(printed.asked_tokens_mean, rel=0.05)
        assert found.output_tokens_mean == pytest.approx(printed.output_tokens_mean, rel=0.05)

    def test_turns_go_on_and_fit_the_context(self) -> None:
        rows = generate_trace("sharegpt-like", 2_000)
        assert max(row.num_tokens for row in rows) <= CHAT_TOKENS
        for row, before in zip(rows, predecessors(rows), strict=True):
            assert row.continues == (before is not None)
            assert before is None or row.prompt_tokens > rows[before].num_tokens


class TestLoogle:
    def test_five_questions_about_each_document(self) -> None:
        rows = generate_trace("loogle-like", 500)
        documents: dict[str | None, list[TraceRow]] = {}
        for row in rows:
            documents.setdefault(row.session, []).append(row)
        assert {len(asked) for asked in documents.values()} == {QUESTIONS_PER_DOCUMENT}
        for asked in documents.values():
            assert {row.block_ids.tobytes() for row in asked} == {asked[0].block_ids.tobytes()}
        firsts = {int(asked[0].block_ids[0]) for asked in documents.values()}
        assert len(firsts) == len(documents)

    def test_long_prompts_short_answers_much_shared(self) -> None:
        found = of("loogle-like")
        assert found.prompt_tokens_mean is not None
        assert found.output_tokens_mean is not None
        assert DOCUMENT_TOKENS < found.prompt_tokens_mean < 1.1 * DOCUMENT_TOKENS
        assert found.output_tokens_mean < 64
        assert found.shared_share == pytest.approx(0.8 * DOCUMENT_TOKENS / 1_054, rel=0.01)


class TestReact:
    def test_all_begin_with_the_same_examples(self) -> None:
        rows = generate_trace("react-like", 300)
        starts = [row for row in rows if not row.continues]
        assert len({row.block_ids.tobytes() for row in starts}) == 1
        assert min(row.prompt_tokens for row in rows) > EXAMPLES_TOKENS

    def test_beside_the_others_of_the_paper(self) -> None:
        chat, documents, agents = (of(f"{name}-like") for name in ("sharegpt", "loogle", "react"))
        outputs = [found.output_tokens_mean or 0.0 for found in (documents, agents, chat)]
        assert all(2 * less < more for less, more in pairwise(outputs))
        assert (agents.shared_share or 0) > 0.9


@pytest.mark.parametrize(
    ("name", "tokens"), [("2k-2k", (2, 2)), ("32k-2k", (32, 2)), ("128k-8k", (128, 8))]
)
def test_fixed_lengths(name: str, tokens: tuple[int, int]) -> None:
    rows = generate_trace(name, 20)
    lengths = {(row.prompt_tokens, row.output_tokens) for row in rows}
    assert lengths == {(tokens[0] * 1_024, tokens[1] * 1_024)}
    printed = PUBLISHED[name].figures
    assert statistics(rows).prompt_per_output == printed.prompt_per_output


@pytest.mark.parametrize("number", range(len(INFINITE_LLM)))
class TestInfinite:
    def test_mean_and_deviation_are_those_of_the_table(self, number: int) -> None:
        for seed in range(3):
            found, printed = of(f"infinite-{number}", 1_000, seed), INFINITE_LLM[number]
            assert found.context_tokens_mean == pytest.approx(printed.mean, rel=0.01)
            assert found.context_tokens_deviation == pytest.approx(printed.deviation, rel=0.01)
            assert (found.context_tokens_max or 0) <= printed.high

    def test_few_requests_stay_in_range(self, number: int) -> None:
        for count in (1, 2, 7):
            rows = generate_trace(f"infinite-{number}", count)
            assert len(rows) == count
            assert all(2 <= row.num_tokens <= INFINITE_LLM[number].high for row in rows)
            assert all(row.prompt_tokens >= row.output_tokens >= 1 for row in rows)


def test_short_traces_have_short_requests_and_a_few_long_ones() -> None:
    lengths = INFINITE_LLM[0].draw(np.random.default_rng(0), 1_000)
    assert np.median(lengths) < 100
    assert 15 <= (lengths > 20_000).sum() <= 30


def test_lengths_without_a_spread() -> None:
    found = ContextLengths(100, 50, 0.0).draw(np.random.default_rng(0), 40)
    assert set(found.tolist()) == {50}
