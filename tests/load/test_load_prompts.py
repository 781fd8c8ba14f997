"""Prompts: seeded, of exact length, shared where the trace says so."""

import numpy as np
import pytest

from kvell.load.prompts import (
    FIRST_ORDINARY_ID,
    WORDS,
    AnswerTokens,
    TokenSource,
    chat_prompts,
    id_prompts,
    text_prompts,
    whole_prompts,
)
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow
from tests.load.loads import conversation, row


def ids(rows: list[TraceRow], seed: int = 0, vocab_size: int = 5_000) -> list[list[int]]:
    return whole_prompts(rows, seed, vocab_size)


class TestIds:
    def test_lengths_and_range(self) -> None:
        [long, short] = ids([row(prompt=20_000), row(prompt=1)])
        assert (len(long), len(short)) == (20_000, 1)
        assert min(long) >= FIRST_ORDINARY_ID
        assert max(long) < 5_000
        assert len(set(long)) > 4_500

    def test_they_are_spread_evenly(self) -> None:
        [found] = ids([row(prompt=100_000)])
        counts, _ = np.histogram(found, bins=50, range=(FIRST_ORDINARY_ID, 5_000))
        assert counts.std() < 3 * np.sqrt(counts.mean())

    @pytest.mark.parametrize("size", [2, 100, 256, 400])
    def test_small_vocabularies(self, size: int) -> None:
        [found] = ids([row(prompt=2_000)], vocab_size=size)
        assert 0 <= min(found) <= max(found) == size - 1

    def test_equal_blocks_are_equal_tokens(self) -> None:
        first, second, third = ids(
            [row(blocks=[5, 6, 7]), row(prompt=5, blocks=[5, 6]), row(blocks=[9, 6])]
        )
        assert first[:4] == second[:4]
        assert first[4:] != second[4:]
        assert third[2:4] == first[2:4]
        assert third[:2] != first[:2]

    def test_a_block_that_the_prompt_cuts_off(self) -> None:
        whole, part = ids([row(prompt=6, blocks=[5, 6, 7]), row(prompt=5, blocks=[5, 6, 7])])
        assert part == whole[:5]

    def test_hashes_of_any_size(self) -> None:
        first, second = ids([row(blocks=[-(1 << 62), 1 << 62]), row(blocks=[-(1 << 62), 3])])
        assert first[:2] == second[:2]
        assert first[2:4] != second[2:4]

    def test_requests_share_nothing_else(self) -> None:
        found = ids([row(prompt=8), row(prompt=8)], seed=1)
        assert found[0][0] != found[1][0]
        assert found == ids([row(prompt=8), row(prompt=8)], seed=1)
        assert found != ids([row(prompt=8), row(prompt=8)], seed=2)

    @pytest.mark.parametrize("name", ["loogle-like", "react-like", "tree", "chat"])
    def test_of_workloads(self, name: str) -> None:
        rows = generate_trace(name, 30)
        assert [len(prompt) for prompt in ids(rows)] == [one.prompt_tokens for one in rows]


class TestTurns:
    def test_whole_prompts_hold_made_up_answers(self) -> None:
        first, second, third = ids(conversation())
        assert second[:6] == first
        assert third[:13] == second
        assert second[6:10] == TokenSource.of_vocabulary(0, 5_000).answer(0, 4).tolist()

    def test_ids_that_the_server_tells_are_taken(self) -> None:
        prompts = id_prompts(conversation(), 0, 5_000, lambda _text: [1, 2])
        first = prompts.ask(0)["prompt"]
        prompts.on_answer(0, AnswerTokens("text", [7, 8, 9]))
        second = prompts.ask(1)["prompt"]
        assert second[:9] == [*first, 7, 8, 9]
        assert len(second) == 6 + 3 + 3
        prompts.on_answer(1, AnswerTokens("text", []))
        assert prompts.ask(2)["prompt"][:14] == [*second, 1, 2]

    def test_no_answer_no_next_turn(self) -> None:
        prompts = text_prompts(conversation(), 0)
        assert [prompts.can_ask(index) for index in range(3)] == [True, False, False]
        prompts.ask(0)
        assert not prompts.can_ask(1)
        prompts.on_answer(0, AnswerTokens("", []))
        assert prompts.can_ask(1)
        with pytest.raises(KeyError):
            prompts.ask(2)

    def test_nothing_is_kept_of_turns_that_nobody_follows(self) -> None:
        prompts = text_prompts(conversation(), 0)
        for index in range(3):
            prompts.ask(index)
            prompts.on_answer(index, AnswerTokens("yes", []))
        assert not prompts._said
        assert not prompts._prompts


class TestWords:
    def test_one_for_each_token(self) -> None:
        found = text_prompts([row(prompt=400)], 0).ask(0)["prompt"]
        words = found.split(" ")
        assert words[0] == ""
        assert len(words) == 401
        assert set(words[1:]) <= set(WORDS)
        assert len(set(words)) > 200

    def test_no_word_is_there_twice(self) -> None:
        assert len(set(WORDS)) == len(WORDS) > 500
        assert all(word.isalpha() and word.islower() for word in WORDS)

    def test_shared_prefixes(self) -> None:
        prompts = text_prompts([row(blocks=[5, 6]), row(blocks=[5, 6])], 0)
        first, second = (prompts.ask(index)["prompt"].split() for index in range(2))
        assert first[:4] == second[:4]
        assert first != second

    def test_a_chat(self) -> None:
        prompts = chat_prompts(conversation(), 0)
        [first] = prompts.ask(0)["messages"]
        assert (first["role"], len(first["content"].split())) == ("user", 6)
        prompts.on_answer(0, AnswerTokens("so", []))
        before, answer, asked = prompts.ask(1)["messages"]
        assert (before, answer) == (first, {"role": "assistant", "content": "so"})
        assert (asked["role"], len(asked["content"].split())) == ("user", 3)
