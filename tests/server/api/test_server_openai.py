"""OpenAI's own client, unchanged, against a live server over fake instances."""

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kvell.testing.instance import ByteText, fake_token

pytestmark = pytest.mark.xdist_group("fake_server")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
MODEL = "fake"
TOOL = {"type": "function", "function": {"name": "f"}}
ODD = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": ODD, "strict": True}}


def answer(prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]", count: int) -> str:
    ids = prompt.astype("<i4").tobytes()
    return "".join(chr(fake_token(ids, i)) for i in range(count))


def answer_to_text(text: str, count: int) -> str:
    return answer(ByteText().encode(text), count)


def answer_to_chat(count: int) -> str:
    return answer(ByteText().encode_chat([{"role": "user", "content": "hi"}]), count)


def test_models(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert (card.id, card.owned_by) == (MODEL, "kvell")


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=20)
    [choice] = reply.choices
    assert choice.message.content == answer_to_chat(20)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert reply.object == "chat.completion"
    assert reply.usage is not None
    prompt_tokens = len("user: hi\nassistant: ")
    assert reply.usage.prompt_tokens == prompt_tokens
    assert reply.usage.completion_tokens == 20
    assert reply.usage.total_tokens == prompt_tokens + 20


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    for cached in (0, len("only here") - 1):
        reply = client.completions.create(model=MODEL, prompt="only here", max_tokens=1)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == cached
        written = reply.usage.prompt_tokens_details.cache_write_tokens
        assert written == len("only here") - 1 - cached


def test_chat_streams_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer_to_chat(100)
    assert len(chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 100
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_without_a_limit_fills_the_context(client: openai.OpenAI) -> None:
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "x" * 4000}]
    reply = client.chat.completions.create(model=MODEL, messages=long)
    assert reply.usage is not None
    assert reply.usage.total_tokens == 4096


def test_content_parts_and_the_developer_role(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            },
        ],
        max_tokens=5,
    )
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "h\ni"}]
    assert reply.choices[0].message.content == answer(ByteText().encode_chat(plain), 5)


def test_completion_defaults_to_sixteen_tokens(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="hello")
    assert reply.choices[0].text == answer_to_text("hello", 16)
    assert reply.object == "text_completion"


@pytest.mark.parametrize(
    "prompt", [["one", "two", "one"], [list(b"one"), list(b"two"), list(b"one")]]
)
def test_several_prompts_are_several_choices(
    client: openai.OpenAI, prompt: list[str] | list[list[int]]
) -> None:
    reply = client.completions.create(model=MODEL, prompt=prompt, max_tokens=7)
    one, two = answer_to_text("one", 7), answer_to_text("two", 7)
    assert [choice.text for choice in reply.choices] == [one, two, one]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (9, 21)


def test_token_ids_are_a_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=list(b"hello"), max_tokens=7)
    assert reply.choices[0].text == answer_to_text("hello", 7)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told_to_who_asks(server_url: str, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 7, "stream": stream}
    plain = httpx.post(f"{server_url}/v1/completions", json=body)
    assert "token_ids" not in plain.text
    reply = httpx.post(f"{server_url}/v1/completions", json=body | {"return_token_ids": True})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    told = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert told == [ord(letter) for letter in answer_to_text("hello", 7)]


def test_several_prompts_stream_side_by_side(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    ends = []
    stream = client.completions.create(
        model=MODEL, prompt=["one", "two"], max_tokens=9, stream=True
    )
    for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: answer_to_text("one", 9), 1: answer_to_text("two", 9)}
    assert ends == ["length", "length"]


@pytest.mark.parametrize("seed", [None, 5])
def test_several_answers_to_each_prompt(client: openai.OpenAI, seed: int | None) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["one", "two"], max_tokens=7, n=3, seed=seed
    )
    one, two = answer_to_text("one", 7), answer_to_text("two", 7)
    assert [choice.text for choice in reply.choices] == [one] * 3 + [two] * 3
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 42)


def test_several_answers_in_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert [choice.message.content for choice in reply.choices] == [answer_to_chat(9)] * 2
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("user: hi\nassistant: ")


def test_several_answers_stream_each_with_its_opening(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=9,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    texts, roles = {0: "", 1: ""}, []
    for chunk in chunks:
        [choice] = chunk.choices
        roles += [choice.index] if choice.delta.role else []
        assert choice.index in roles
        texts[choice.index] += choice.delta.content or ""
    assert sorted(roles) == [0, 1]
    assert texts == dict.fromkeys((0, 1), answer_to_chat(9))
    assert last.usage is not None
    assert last.usage.completion_tokens == 18
    assert last.usage.prompt_tokens == len("user: hi\nassistant: ")


@pytest.mark.parametrize("is_chat", [False, True])
def test_every_piece_says_what_is_used_so_far_to_who_asks(server_url: str, is_chat: bool) -> None:
    said = {"messages": MESSAGES} if is_chat else {"prompt": ["abc", "a longer one"]}
    lengths = [len("user: hi\nassistant: ")] if is_chat else [len(p) for p in said["prompt"]]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "max_tokens": 5, "n": 2, "stream": True, "stream_options": options}
    path = "chat/completions" if is_chat else "completions"
    lines = httpx.post(f"{server_url}/v1/{path}", json=body | said).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    used: dict[int, list[int]] = {}
    for event in events:
        if event["choices"] and "usage" in event:
            index = event["choices"][0]["index"]
            assert event["usage"]["prompt_tokens"] == lengths[index // 2]
            used.setdefault(index, []).append(event["usage"]["completion_tokens"])
    assert sorted(used) == list(range(2 * len(lengths)))
    assert all(counts == sorted(counts) and counts[-1] == 5 for counts in used.values())
    assert events[-1]["usage"]["completion_tokens"] == 5 * len(used)


def test_usage_so_far_is_told_only_to_who_asks(server_url: str) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 3, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    text = httpx.post(f"{server_url}/v1/completions", json=body).text
    assert text.count('"usage"') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    full = answer_to_text("stop here", 40)
    stop = full[20:23]
    cut = full[: full.index(stop)]
    args = {"model": MODEL, "prompt": "stop here", "max_tokens": 4000, "stop": [stop, "\n"]}
    if stream:
        chunks = list(client.completions.create(**args, stream=True))  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        reply = client.completions.create(**args)  # type: ignore[call-overload]
        text, reason = reply.choices[0].text, reply.choices[0].finish_reason
        assert reply.usage.completion_tokens == len(cut) + len(stop)
    assert (text, reason) == (cut, "stop")


def test_a_stop_token_ends_the_text_before_it(client: openai.OpenAI) -> None:
    full = answer_to_text("stop here", 40)
    reply = client.completions.create(
        model=MODEL,
        prompt="stop here",
        max_tokens=40,
        extra_body={"stop_token_ids": [ord(full[10])], "top_k": 5, "ignore_eos": True},
    )
    cut = full[: full.index(full[10])]
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (cut, "stop")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"n": 0}, "n"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -2}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"min_p": 1.5}}, "min_p"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": "x" * 4096}, "prompt"),
        ({"extra_body": {"prompt_embeds": "AAAA"}}, "prompt_embeds"),
        ({"extra_body": {"top_k": 10**30}}, "top_k"),
        ({"extra_body": {"stop_token_ids": [10**30]}}, "stop_token_ids[0]"),
    ],
)
def test_bad_input_is_refused_by_name(
    client: openai.OpenAI, arguments: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "hi"} | arguments)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"structured_outputs": {"regex": ""}}}, "structured_outputs.regex"),
        (
            {"tools": [TOOL], "tool_choice": "required", "extra_body": {"guided_regex": "a"}},
            "guided_regex",
        ),
        (
            {"tools": [STRICT], "tool_choice": "required"},
            "tools[0].function.parameters.properties.a.format",
        ),
        ({"n": 129}, "n"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chats_are_refused_by_name(
    client: openai.OpenAI, arguments: dict[str, object], param: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "stream": stream} | arguments
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert caught.value.param == param


@pytest.mark.parametrize(
    "arguments",
    [{"prompt": "x" * 4096}, {"prompt": [5] * 5000}],
)
def test_too_long_a_prompt_has_openais_code_and_words(
    client: openai.OpenAI, arguments: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, **arguments)
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is" in caught.value.message
    assert "prompt is too long" in caught.value.message


def test_fields_that_only_accompany_a_request_are_accepted(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=1,
        n=1,
        user="someone",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        frequency_penalty=0,
        presence_penalty=0.0,
        extra_body={"repetition_penalty": 1.0},
    )
    assert reply.choices[0].finish_reason == "length"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="hi")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_refusal_by_the_instance_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="can never fit"):
        client.completions.create(model=MODEL, prompt=[2])
    with pytest.raises(openai.BadRequestError, match="can never fit"):
        client.completions.create(model=MODEL, prompt=[2], stream=True)


def test_too_large_a_body_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 100_000)
    assert caught.value.status_code == 413
