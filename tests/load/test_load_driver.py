"""The open loop in virtual time, to the last digit; and its prompts: seeded, of exact length."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from kvell.errors import ChangeSomething
from kvell.load.arrivals import hang_ups, retime, think_times
from kvell.load.driver import NO_ANSWER_BEFORE
from kvell.load.http.wire import ConnectionFailed, Wire
from kvell.load.outcome import Outcome
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
from kvell.load.report import Objectives, summary
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow
from tests.load.loads import conversation, drive, row
from tests.load.virtual_time import FakeServer, event, refused


def sent(server: FakeServer) -> Sequence[float]:
    return pytest.approx([asked.at_seconds for asked in server.asked])  # type: ignore[return-value]


class TestFigures:
    @pytest.mark.parametrize(("first", "each", "tokens"), [(0.5, 0.1, 4), (2.0, 0.03, 200)])
    def test_are_the_servers_own(self, first: float, each: float, tokens: int) -> None:
        [found] = drive(FakeServer(first, each), [row(output=tokens)])
        assert found.ttft_seconds == pytest.approx(first)
        assert found.tpot_seconds == pytest.approx(each)
        assert found.e2e_seconds == pytest.approx(first + each * (tokens - 1))
        assert found.inter_token_seconds == pytest.approx([each] * (tokens - 1))
        assert found.output_tokens == tokens
        assert (found.failure, found.hung_up, found.lag_seconds) == (None, False, 0.0)

    def test_one_token_has_no_time_per_token(self) -> None:
        [found] = drive(FakeServer(), [row(output=1)])
        assert found.tpot_seconds is None
        assert found.e2e_seconds == pytest.approx(0.5)

    def test_a_run(self) -> None:
        rows = [row(second) for second in (0.0, 1.0, 2.0, 3.0)]
        found = summary(drive(FakeServer(), rows), Objectives(0.6, 0.2))
        assert found["completed"] == 4
        assert found["duration_seconds"] == pytest.approx(3.8)
        assert found["request_rate"] == found["goodput"] == pytest.approx(4 / 3.8)
        assert found["output_tokens_per_second"] == pytest.approx(16 / 3.8)
        assert found["open_requests_max"] == 1
        assert found["send_lag_seconds"]["p99"] == 0.0

    def test_cached_tokens_come_from_the_server(self) -> None:
        found = drive(FakeServer(cached_tokens=3), [row(prompt=6), row(prompt=6)])
        assert [one.cached_tokens for one in found] == [3, 3]
        assert summary(found, Objectives())["cached_share"] == pytest.approx(0.5)


class TestOpenLoop:
    def test_a_slow_server_delays_nobody(self) -> None:
        times = [0.0, 0.1, 0.15, 4.0, 4.0]
        slow, quick = FakeServer(first_seconds=50.0), FakeServer(first_seconds=0.01)
        found = [drive(server, [row(at) for at in times]) for server in (slow, quick)]
        assert sent(slow) == times
        assert sent(quick) == times
        lags = [one.lag_seconds for run in found for one in run]
        assert lags == pytest.approx([0.0] * 10)

    def test_outcomes_come_in_the_order_of_the_rows(self) -> None:
        found = drive(FakeServer(), [row(output=40), row(0.1, output=1)])
        assert [one.index for one in found] == [0, 1]
        assert found[0].ended_seconds > found[1].ended_seconds

    def test_a_thousand_at_once(self) -> None:
        server = FakeServer()
        found = drive(server, retime([row()] * 1_000, rate=float("inf")))
        assert summary(found, Objectives())["open_requests_max"] == 1_000
        assert {one.ttft_seconds for one in found} == {0.5}
        assert len({asked.raw for asked in server.asked}) == 1_000


class TestSessions:
    def test_a_turn_waits_for_the_answer_before_it(self) -> None:
        server = FakeServer()
        drive(server, conversation())
        # The first answer ends at 0.8, after the trace's gap of 0.2; the last gap is longer.
        assert sent(server) == [0.0, 0.8, 0.8 + 8.8]

    def test_thinking_begins_when_the_answer_has_ended(self) -> None:
        server = FakeServer()
        drive(server, conversation(), thinks=[9.0, 3.0, 0.0])
        assert sent(server) == [0.0, 0.8 + 3.0, 3.8 + 0.8]

    def test_a_prompt_begins_with_all_that_was_said(self) -> None:
        server, rows = FakeServer(), conversation()
        drive(server, rows, text_prompts(rows, 0))
        first, second, third = (asked.prompt for asked in server.asked)
        assert second.startswith(first + " a0.0 a0.1 a0.2 a0.3")
        assert third.startswith(second + " a1.0 a1.1 a1.2 a1.3")
        own = [len(first.split()), *(len(t.split()) for t in (second, third))]
        assert own == [6, 6 + 4 + 3, 13 + 4 + 2]

    def test_ids_of_answers(self) -> None:
        server = FakeServer()
        drive(server, conversation())
        first, second, _third = (asked.prompt for asked in server.asked)
        assert second[: len(first) + 1] == [*first, len(" a0.0 a0.1 a0.2 a0.3")]

    def test_chats_are_messages(self) -> None:
        server, rows = FakeServer(), conversation()
        drive(server, rows, chat_prompts(rows, 0), wire=Wire("fake", "chat"))
        last = server.asked[2].body["messages"]
        assert [one["role"] for one in last] == ["user", "assistant"] * 2 + ["user"]
        assert last[1]["content"] == " a0.0 a0.1 a0.2 a0.3"
        assert {asked.path for asked in server.asked} == {"/v1/chat/completions"}

    def test_others_do_not_wait(self) -> None:
        server = FakeServer(first_seconds=10.0)
        drive(server, [row(session="a"), row(0.1, session="b"), row(0.2, session="a")])
        assert sent(server) == [0.0, 0.1, 10.3]

    def test_without_an_answer_the_session_ends(self) -> None:
        server = FakeServer(problem=lambda number: refused(503) if number == 1 else None)
        found = drive(server, conversation())
        assert [one.failure for one in found] == [None, "HTTP 503", NO_ANSWER_BEFORE]
        assert len(server.asked) == 2


class TestHangingUp:
    def test_closes_the_stream_after_so_many_pieces(self) -> None:
        server = FakeServer()
        found = drive(server, [row(output=9), row(output=9)], hang_ups=[3, None])
        assert (server.left, server.ended) == ([0], [1])
        assert [one.hung_up for one in found] == [True, False]
        assert len(found[0].token_seconds) == 3
        assert found[0].ended_seconds == pytest.approx(0.7)
        report = summary(found, Objectives())
        assert (report["completed"], report["failed"], report["disconnected"]) == (1, 0, 1)
        assert report["output_tokens"] == 9

    def test_the_session_goes_on_from_what_was_heard(self) -> None:
        server, rows = FakeServer(), conversation()
        drive(server, rows, text_prompts(rows, 0), hang_ups=[2, None, None])
        first, second = (asked.prompt for asked in server.asked[:2])
        assert second.removeprefix(first).split()[:2] == ["a0.0", "a0.1"]
        assert "a0.2" not in second
        assert server.left == [0]

    def test_a_shorter_answer_is_complete(self) -> None:
        [found] = drive(FakeServer(), [row(output=2)], hang_ups=[5])
        assert found.is_complete


class TestFailures:
    def one(self, problem: Exception | bytes, **more: float) -> Outcome:
        """Return the outcome of the second of two requests, which fails."""
        server = FakeServer(problem=lambda number: problem if number else None)
        found = drive(server, [row(), row(1.0)], **more)  # type: ignore[arg-type]
        assert found[0].is_complete
        assert not found[1].is_complete
        return found[1]

    @pytest.mark.parametrize(
        ("problem", "reason"),
        [
            (refused(500), "HTTP 500"),
            (refused(400), "HTTP 400"),
            (ConnectionFailed("the connection was lost"), "the connection was lost"),
            (b"", "the stream ended early"),
            (event({"error": {"message": "out of luck"}}), "error event: out of luck"),
            (b"data: what?\n\n", "an event that is not OpenAI's"),
        ],
    )
    def test_are_counted_by_reason(self, problem: Exception | bytes, reason: str) -> None:
        found = self.one(problem)
        assert found.failure == reason
        report = summary([found], Objectives())
        assert (report["failed"], report["failures"]) == (1, {reason: 1})

    def test_patience_ends(self) -> None:
        server = FakeServer(each_seconds=1.0)
        [found] = drive(server, [row(output=5)], timeout=2.75)
        assert found.failure == "no complete answer within 2.75 s"
        assert found.ended_seconds == pytest.approx(2.75)
        assert len(found.token_seconds) == 3

    @pytest.mark.parametrize(
        ("status", "field"), [(400, "--model"), (404, "--model"), (401, "--api-key")]
    )
    def test_a_first_request_refused_ends_the_run(self, status: int, field: str) -> None:
        server = FakeServer(problem=lambda _number: refused(status))
        with pytest.raises(ChangeSomething, match=f"HTTP {status}: no") as raised:
            drive(server, [row(), row(0.1), row(900.0)])
        assert raised.value.field == field
        assert len(server.asked) == 2

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_what_may_pass_ends_nothing(self, status: int) -> None:
        server = FakeServer(problem=lambda number: None if number else refused(status))
        assert [one.is_complete for one in drive(server, [row(), row(1.0)])] == [False, True]


class TestSeeds:
    def bodies(self, seed: int) -> list[bytes]:
        server = FakeServer()
        rows = [row(blocks=[7, 8, 9]), row(0.1, blocks=[7, 8]), *conversation()]
        drive(server, sorted(rows, key=lambda one: one.arrival_s), seed=seed)
        return [asked.raw for asked in server.asked]

    def test_the_same_seed_sends_the_same_bytes(self) -> None:
        assert self.bodies(3) == self.bodies(3)
        assert not set(self.bodies(3)) & set(self.bodies(4))

    def test_what_a_body_says(self) -> None:
        server = FakeServer()
        drive(server, [row(output=5)], wire=Wire("m", extra={"top_k": 1}))
        body = server.asked[0].body
        assert len(body.pop("prompt")) == 6
        assert body == {
            "model": "m",
            "max_tokens": 5,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": 1,
        }

    def test_ignore_eos_can_be_left_out(self) -> None:
        server = FakeServer()
        drive(server, [row()], wire=Wire("m", ignore_eos=False))
        assert "ignore_eos" not in server.asked[0].body


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


class TestTimes:
    def test_a_trace_keeps_its_own_from_zero(self) -> None:
        rows = retime([row(5.0), row(5.5), row(9.0)], rate=None)
        assert [one.arrival_s for one in rows] == [0.0, 0.5, 4.0]

    def test_a_scale_makes_them_longer(self) -> None:
        rows = retime([row(5.0), row(5.5), row(9.0)], rate=None, time_scale=2.5)
        assert [one.arrival_s for one in rows] == [0.0, 1.25, 10.0]

    def test_all_at_once(self) -> None:
        assert {one.arrival_s for one in retime([row(1.0), row(2.0)], rate=float("inf"))} == {0.0}

    @pytest.mark.parametrize("rate", [0.5, 40.0])
    def test_a_poisson_process(self, rate: float) -> None:
        rows = retime([row()] * 20_000, rate=rate, seed=3)
        gaps = np.diff([one.arrival_s for one in rows]) * rate
        assert rows[0].arrival_s == 0.0
        assert gaps.mean() == pytest.approx(1.0, rel=0.03)
        assert gaps.std() == pytest.approx(1.0, rel=0.03)
        assert np.median(gaps) == pytest.approx(np.log(2), rel=0.03)

    def test_only_times_change(self) -> None:
        rows = [row(1.0, prompt=9), row(2.0, prompt=8, session="s")]
        found = retime(rows, rate=1.0)
        assert [(one.prompt_tokens, one.session) for one in found] == [(9, None), (8, "s")]
        assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(found))

    def test_the_seed_decides(self) -> None:
        def times(seed: int) -> list[float]:
            return [one.arrival_s for one in retime([row()] * 9, rate=1.0, seed=seed)]

        assert times(1) == times(1) != times(2)


def test_thinking_is_exponential() -> None:
    found = np.asarray(think_times(20_000, 4.0, seed=1))
    assert found.mean() == pytest.approx(4.0, rel=0.03)
    assert found.std() == pytest.approx(4.0, rel=0.03)
    assert think_times(5, 0.0) == [0.0] * 5


class TestHangUps:
    def test_nobody_and_everybody(self) -> None:
        rows = [row(output=9)] * 50
        assert hang_ups(rows, 0.0) == [None] * 50
        everybody = hang_ups(rows, 1.0)
        assert {pieces is not None and 1 <= pieces < 9 for pieces in everybody} == {True}
        assert len(set(everybody)) > 4

    def test_a_share(self) -> None:
        found = hang_ups([row(output=100)] * 5_000, 0.2, seed=2)
        assert sum(pieces is not None for pieces in found) == pytest.approx(1_000, rel=0.1)
        assert found == hang_ups([row(output=100)] * 5_000, 0.2, seed=2)

    def test_more_of_them_are_the_same_and_others(self) -> None:
        rows = [row(output=100)] * 500
        few, many = hang_ups(rows, 0.1, seed=2), hang_ups(rows, 0.5, seed=2)
        assert all(more == pieces for pieces, more in zip(few, many, strict=True) if pieces)
