"""Streams as OpenAI's servers write them, however the network cuts them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.load.answers import AnswerReader, error_text
from tests.load.virtual_time import event

DONE = b"data: [DONE]\n\n"


def piece(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, **more}
    return event({"id": "x", "object": "text_completion", "choices": [choice]})


def said(content: str | None, finish: str | None = None, key: str = "content") -> bytes:
    choice = {"index": 0, "delta": {} if content is None else {key: content}}
    return event({"choices": [choice | {"finish_reason": finish}], "usage": None})


def usage(tokens: int, **more: Any) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, **more}}
    )


def read(*parts: bytes) -> AnswerReader:
    reader = AnswerReader()
    for second, part in enumerate(parts):
        reader.feed(float(second), part)
    return reader


def test_a_completion() -> None:
    found = read(piece("Hel"), piece("lo"), piece("", "length"), usage(3), DONE)
    assert found.content_seconds == [0.0, 1.0]
    assert found.answer.text == "Hello"
    assert found.output_tokens == 3
    assert found.last_seconds == 4.0
    assert (found.has_ended, found.problem()) == (True, None)


def test_a_chat_begins_with_its_first_words() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    found = read(role, said("Hi"), said("!", "stop"), said(None), usage(2), DONE)
    assert found.content_seconds == [1.0, 2.0]
    assert found.answer.text == "Hi!"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_are_content(key: str) -> None:
    found = read(said("hm", key=key), said("so", "stop"))
    assert found.content_seconds == [0.0, 1.0]
    assert found.answer.text == "hmso"


def test_token_ids_are_content_even_without_text() -> None:
    found = read(piece("", token_ids=[5]), piece("a", "length", token_ids=[6, 7]), DONE)
    assert found.content_seconds == [0.0, 1.0]
    assert found.answer.token_ids == [5, 6, 7]
    assert found.output_tokens == 3


def test_an_answer_without_any_text() -> None:
    found = read(piece(""), piece(""), piece("", "length"), usage(3), DONE)
    assert found.content_seconds == [0.0, 1.0, 2.0]
    assert found.problem() is None


def test_without_usage_pieces_are_counted() -> None:
    assert read(piece("a"), piece("b", "length"), DONE).output_tokens == 2


def test_cached_tokens() -> None:
    found = read(piece("a", "stop"), usage(1, prompt_tokens_details={"cached_tokens": 2}))
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 2
    nothing = read(usage(1, prompt_tokens_details=None)).usage
    assert nothing is not None
    assert nothing.prompt_tokens_details is None


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], "the stream ended early"),
        ([piece("a")], "the stream ended early"),
        ([DONE], "no tokens"),
        ([piece("a"), event({"error": {"message": "no room"}})], "error event: no room"),
        ([event({"error": "gone"}), DONE], "error event: gone"),
        ([piece("a"), b"data: {oops\n\n", DONE], "an event that is not OpenAI's"),
        ([b'data: {"choices": 3}\n\n', DONE], "an event that is not OpenAI's"),
    ],
)
def test_what_is_no_answer(parts: list[bytes], problem: str) -> None:
    assert read(*parts).problem() == problem


WHOLE = b": ping\r\n\r\n" + b"".join(
    (piece("Größe "), b"event: message\n", piece("π"), said("!"), piece("", "stop"), usage(7), DONE)
).replace(b"\n", b"\r\n")


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_the_network_may_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    found = read(*(WHOLE[a:b] for a, b in pairwise(edges)))
    assert found.answer.text == "Größe π!"
    assert len(found.content_seconds) == 3
    assert found.content_seconds == sorted(found.content_seconds)
    assert (found.output_tokens, found.problem()) == (7, None)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "too\nlong", "code": 1}}, "too long"),
        ({"error": "plain"}, "plain"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"message": "vLLM's older shape"}, "vLLM's older shape"),
        ("just text", "just text"),
    ],
)
def test_errors_in_one_line(body: Any, text: str) -> None:
    assert error_text(json.dumps(body).encode()) == text


def test_errors_that_are_not_json() -> None:
    assert error_text(b"<html>502\xff</html>").startswith("<html>502")
    assert len(error_text(b"x" * 5_000)) == 300
