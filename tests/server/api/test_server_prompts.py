"""Prompts to token ids that fit, and answers to bodies."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvell.errors import ChangeSomething
from kvell.models.text.chat_template import NO_FIELDS
from kvell.server.api.bodies.completions import (
    Heading,
    model_card,
    usage_body,
)
from kvell.server.api.prompts import PromptEncoder
from kvell.server.logs.lines import FIELDS
from kvell.server.text.lanes import TextWork
from kvell.server.text.text_bounds import AnswerRoom, ContextLength, ContextTooLong
from kvell.server.text.text_stream import TextDelta, Usage, WholeAnswer
from kvell.testing.instance import ByteText

HEADING = Heading("id-1", "m", 1234)


def encoded(prompt: str | list[int], max_model_len: int = 10) -> NDArray[np.int32]:
    work = TextWork()
    ids = asyncio.run(PromptEncoder(ByteText(), ContextLength(max_model_len), work).prompt(prompt))
    work.close()
    return ids


def test_text_and_ids_become_int32() -> None:
    for prompt in ("hello", list(b"hello")):
        ids = encoded(prompt)
        assert ids.dtype == np.int32
        assert ids.tolist() == list(b"hello")


def test_one_token_of_room_is_enough_and_none_is_not() -> None:
    assert len(encoded("123456789")) == 9
    for prompt in ("1234567890", [5] * 10, "x" * 1000):
        with pytest.raises(ContextTooLong, match="send at most 9 tokens"):
            encoded(prompt)


@pytest.mark.parametrize(("prompt", "value"), [([256], 256), ([1, 999, 2], 999)])
def test_ids_outside_the_vocabulary_are_refused(prompt: list[int], value: int) -> None:
    with pytest.raises(ChangeSomething, match="is not a token of this model") as caught:
        encoded(prompt)
    assert caught.value.value == value


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: str | list[int]) -> None:
    with pytest.raises(ChangeSomething, match="has no tokens"):
        encoded(prompt)


def test_a_conversation_is_named_messages_when_it_is_too_long() -> None:
    work = TextWork()
    encoder = PromptEncoder(ByteText(), ContextLength(5), work)
    with pytest.raises(ContextTooLong) as caught:
        asyncio.run(encoder.chat([{"role": "user", "content": "hello"}]))
    assert caught.value.field == "messages"
    work.close()


async def test_tokenizing_happens_in_one_thread_that_is_not_the_loops() -> None:
    threads: set[int] = set()

    class Noting(ByteText):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
            threads.add(threading.get_ident())
            return super().encode(text)

    work = TextWork()
    encoder = PromptEncoder(Noting(), ContextLength(100), work)
    await asyncio.gather(*(encoder.prompt(f"prompt {i}") for i in range(10)))
    work.close()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_messages_are_read_in_the_thread_of_texts() -> None:
    threads: set[int] = set()

    class Noting(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            threads.add(threading.get_ident())
            return super().get(key, default)

    work = TextWork()
    encoder = PromptEncoder(ByteText(), ContextLength(100), work)
    await encoder.chat([Noting(role="user", content="hi")])
    work.close()
    assert threads and threading.get_ident() not in threads


def test_a_template_that_ignores_tools_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    messages = [{"role": "user", "content": "hi"}]

    def told(model: ByteText) -> list[str]:
        work = TextWork()
        encoder = PromptEncoder(model, ContextLength(100), work)
        asyncio.run(encoder.chat(messages))
        assert caplog.messages == []
        for _ in range(3):
            asyncio.run(encoder.chat(messages, [tool]))
        work.close()
        return caplog.messages

    assert told(ByteText()) == []
    assert told(ByteText(takes_tools=False)) == ["chat_template_ignores_tools"]
    fields = getattr(caplog.records[0], FIELDS)
    assert fields["model"] == "fake" and "--chat-template" in fields["remedy"]


def test_the_model_card_says_whether_tools_are_shown() -> None:
    told = [model_card("m", ContextLength(1), 1, one) for one in (True, False, None)]
    assert [one["chat_template_takes_tools"] for one in told] == [True, False, None]


def test_deltas_join_into_one_answer() -> None:
    deltas = [TextDelta("a"), TextDelta("b"), TextDelta("c", "stop", Usage(1, 2, 0))]
    answer = WholeAnswer()
    for delta in deltas:
        answer.push(delta)
    made = answer.delta()
    assert (made.text, made.finish_reason, made.usage) == ("abc", "stop", Usage(1, 2, 0))


def test_usage_of_several_prompts_adds_up() -> None:
    assert usage_body(Usage(1, 2, 3, 4) + Usage(10, 20, 30, 40)) == {
        "prompt_tokens": 11,
        "completion_tokens": 22,
        "total_tokens": 33,
        "prompt_tokens_details": {"cached_tokens": 33, "cache_write_tokens": 44},
    }


def test_chunks_repeat_the_heading() -> None:
    choice = HEADING.choice(0, TextDelta("x"), delta={"content": "x"})
    for used in (None, Usage(3, 1)):
        body = HEADING.chunk("chat.completion.chunk", choice, used)
        assert (body["id"], body["model"], body["created"]) == ("id-1", "m", 1234)
        assert body["object"] == "chat.completion.chunk"
        assert ("usage" in body) == (used is not None)


def test_the_model_card_names_the_context() -> None:
    card = model_card("m", ContextLength(4096), 1)
    assert (card["id"], card["max_model_len"]) == ("m", 4096)


def test_a_prompt_may_be_as_long_as_instances_reach_together() -> None:
    reached = [40]
    length = ContextLength(10, lambda: reached[0], model_tokens=100)
    assert (length.alone_tokens, length.reach_tokens, length.longest_tokens) == (10, 40, 100)
    assert length.answer_room(9) == AnswerRoom(1, 31)
    assert length.answer_room(10) == AnswerRoom(30, 30)
    reached[0] = 0
    assert length.answer_room(10) == AnswerRoom(0, 0)
    card = model_card("m", length, 1)
    assert (card["max_model_len"], card["reach_tokens"]) == (10, 10)


class TakesApart(ByteText):
    """A model whose chat template goes through the arguments of calls, as Qwen3-Coder's does."""

    def rendered_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
    ) -> str:
        shown = ""
        for message in messages:
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, dict):
                    raise ChangeSomething("messages", "…", "str has no items", "send others")
                shown += "".join(f"{name}={value};" for name, value in arguments.items())
        if not shown:
            raise ChangeSomething("messages", "…", "have no calls", "send some")
        return shown


def test_half_an_object_reaches_a_template_that_takes_objects_apart() -> None:
    function = {"name": "f", "arguments": '{"city": "Be'}
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]
    work = TextWork()
    encoder = PromptEncoder(TakesApart(), ContextLength(100), work)
    ids = asyncio.run(encoder.chat(messages))
    assert bytes(ids.tolist()).decode() == 'arguments={"city": "Be;'
    with pytest.raises(ChangeSomething, match="have no calls"):
        asyncio.run(encoder.chat([{"role": "user", "content": "hi"}]))
    work.close()
