"""vLLM's fields beside OpenAI's: each is honoured, or refused by its own name."""

import asyncio
import logging
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from kvell.engine.protocol.sampling_params import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, SamplingParams
from kvell.errors import ChangeSomething
from kvell.server.api.prompts import PromptEncoder
from kvell.server.api.schemas.chat import ChatRequest
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.api.serve_options import ServeOptions
from kvell.server.http_face import HttpFace
from kvell.server.logs.lines import FIELDS
from kvell.server.text.lanes import TextWork
from kvell.server.text.text_bounds import AnswerRoom, ContextLength
from kvell.server.text.text_encoder import PromptForm
from kvell.server.text.text_model import LoadedTexts
from kvell.testing.instance import ByteText
from tests.server.api.bodies import chat, completion, events, room

pytestmark = pytest.mark.xdist_group("fake_server")

DEFAULTS = SamplingParams(
    temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=50
)
WISHES: dict[str, Any] = {
    "bad_words": ["a", "b"],
    "allowed_token_ids": [5, 6],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}
USER = {"role": "user", "content": "hi"}


def test_each_reaches_the_engine_from_every_route() -> None:
    for body in (
        completion(**WISHES),
        chat(**WISHES),
        ResponsesRequest.model_validate({"input": "hi", **WISHES}).chat(),
    ):
        sampling = body.sampling(room(100))
        told = {name: getattr(sampling, name) for name in WISHES}
        assert told == WISHES | {"bad_words": ("a", "b"), "allowed_token_ids": (5, 6)}


def test_null_is_the_default() -> None:
    names = (*WISHES, "spaces_between_special_tokens", "truncate_prompt_tokens")
    nulls = dict.fromkeys((*names, "add_special_tokens"))
    assert completion(**nulls).sampling(room(100)) == SamplingParams(max_tokens=16)
    assert completion(**nulls).form() == PromptForm(answer_tokens=16)
    assert chat(**nulls, continue_final_message=None).form() == PromptForm(add_special_tokens=False)


def test_what_the_model_recommends_is_taken_where_the_body_says_nothing() -> None:
    assert chat().sampling(room(100), DEFAULTS) == DEFAULTS
    assert chat().sampling(room(20), DEFAULTS).max_tokens == 20
    assert chat(max_tokens=90).sampling(room(100), DEFAULTS).max_tokens == 90
    assert completion().sampling(room(100), DEFAULTS).max_tokens == 16, "OpenAI's own default"
    assert completion(max_tokens=None).sampling(AnswerRoom(100, 900), DEFAULTS).max_tokens == 50
    neutral: dict[str, Any] = {
        "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1,
    }  # fmt: skip
    sampling = chat(**neutral, max_tokens=9).sampling(room(100), DEFAULTS)
    assert sampling == SamplingParams(temperature=0, max_tokens=9)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["five"]),
        ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKENS + 1)),
        ("bad_words", ["a"] * (MAX_BAD_WORDS + 1)),
        ("bad_words", "a"),
        ("truncate_prompt_tokens", -2),
        ("include_stop_str_in_output", "sometimes"),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_what_cannot_be_is_refused_by_its_name(make: Any, field: str, bad: Any) -> None:
    with pytest.raises(ValidationError) as told:
        make(**{field: bad})
    assert {error["loc"][0] for error in told.value.errors()} == {field}


def test_only_one_ending_can_be_asked_for() -> None:
    for fields in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": None}):
        with pytest.raises(ChangeSomething, match="set add_generation_prompt to false") as told:
            chat(**fields, continue_final_message=True).continues_last()
        assert told.value.field == "continue_final_message"
    assert chat(add_generation_prompt=False, continue_final_message=True).continues_last()
    assert not chat().continues_last()


def encoded(prompt: str | list[int], body: CompletionRequest | ChatRequest) -> str:
    """The text of what is kept of a prompt, for a model of ten tokens."""
    work = TextWork()
    encoder = PromptEncoder(ByteText(), ContextLength(10), work)
    try:
        if isinstance(body, ChatRequest):
            said = [{"role": "user", "content": prompt}]
            ids = asyncio.run(encoder.chat(said, form=body.form(), opens_answer=False))
        else:
            ids = asyncio.run(encoder.prompt(prompt, form=body.form()))
    finally:
        work.close()
    return bytes(ids.tolist()).decode()


def test_the_last_tokens_of_a_prompt_are_kept() -> None:
    for prompt in ("0123456789abcdef", list(b"0123456789abcdef"), "x" * 90_000 + "bcdef"):
        assert encoded(prompt, completion(truncate_prompt_tokens=5)) == "bcdef"
    assert encoded("abc", completion(truncate_prompt_tokens=5)) == "abc"
    long = "0123456789abcdef"
    assert encoded(long, completion(truncate_prompt_tokens=-1, max_tokens=4)) == "abcdef"
    assert encoded(long, completion(truncate_prompt_tokens=-1, max_tokens=None)) == long[-9:]
    assert encoded(long, chat(truncate_prompt_tokens=4)) == "def\n"
    assert encoded("user", chat(truncate_prompt_tokens=-1, max_tokens=1)) == "ser: user\n"[-9:]
    with pytest.raises(ChangeSomething, match="prompt="):
        encoded(long, completion())


def test_no_more_than_the_context_can_be_kept() -> None:
    with pytest.raises(ChangeSomething, match="use at most 10, or -1") as told:
        encoded("abc", completion(truncate_prompt_tokens=11))
    assert told.value.field == "truncate_prompt_tokens"


class MarkedText(ByteText):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        return super().encode("^" * add_special_tokens + text)


def test_special_tokens_are_added_to_texts_and_not_to_conversations_unless_asked() -> None:
    work = TextWork()
    encoder = PromptEncoder(MarkedText(), ContextLength(100), work)

    def starts(body: CompletionRequest | ChatRequest) -> bool:
        form = body.form()
        made = encoder.chat([USER], form=form) if isinstance(body, ChatRequest) else None
        return bytes(asyncio.run(made or encoder.prompt("hi", form=form)).tolist())[:1] == b"^"

    assert starts(completion()) and starts(chat(add_special_tokens=True))
    assert not starts(chat()) and not starts(completion(add_special_tokens=False))
    work.close()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("completions", {"allowed_token_ids": [1] * 40_000}, "allowed_token_ids"),
        ("completions", {"bad_words": [""]}, "bad_words"),
        ("completions", {"bad_words": ["a" * 300]}, "bad_words"),
        ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("completions", {"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("responses", {"bad_words": [""]}, "bad_words"),
        ("responses", {"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ],
)
def test_a_refusal_names_the_field(
    server_url: str, path: str, fields: dict[str, Any], param: str
) -> None:
    said = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
    body = {"model": "fake"} | said.get(path, {"messages": [USER]}) | fields
    reply = httpx.post(f"{server_url}/v1/{path}", json=body)
    assert reply.status_code == 400
    assert str(reply.json()["error"]["param"]).startswith(param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    ("asked", "text", "end"),
    [
        ({"stop": ["c!", "x"]}, "ab", ("stop", "c!")),
        ({"stop": ["c!"], "include_stop_str_in_output": True}, "abc!", ("stop", "c!")),
        ({}, "abc!d", ("stop", None)),
        ({"max_tokens": 2}, "ab", ("length", None)),
    ],
)
def test_answers_say_what_ended_them(
    scripted_url: str,
    stream: bool,
    is_chat: bool,
    asked: dict[str, Any],
    text: str,
    end: tuple[str, str | None],
) -> None:
    said = "SAY abc!d"
    given = {"messages": [USER | {"content": said}]} if is_chat else {"prompt": said}
    path = "chat/completions" if is_chat else "completions"
    pieces = events(scripted_url, path, stream=stream, **given, **asked)
    name = "delta" if stream else "message"
    parts = [one[name] if is_chat else {"content": one["text"]} for one in pieces]
    assert "".join(one.get("content") or "" for one in parts) == text
    assert (pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]) == end
    assert all(one["stop_reason"] is None for one in pieces[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_told_by_its_id(client: openai.OpenAI, stream: bool) -> None:
    every = list(range(1, 256))
    made: Any = client.completions.create(
        model="fake",
        prompt="hi",
        stream=stream,
        extra_body={"stop_token_ids": every, "include_stop_str_in_output": True},
    )
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    text = "".join(choice.text for choice in choices)
    assert len(text) == 1
    assert choices[-1].stop_reason == ord(text)


def test_a_conversation_ends_within_its_last_message(server_url: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Sure: "}]
    ending = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"model": "fake", "messages": messages} | ending
    tokens = httpx.post(f"{server_url}/tokenize", json=body).json()["tokens"]
    assert bytes(tokens).decode() == "user: hi\nassistant: Sure: "
    usage = httpx.post(f"{server_url}/v1/chat/completions", json=body | {"max_tokens": 1}).json()
    assert usage["usage"]["prompt_tokens"] == len(tokens)
    refused = httpx.post(f"{server_url}/tokenize", json=body | {"add_generation_prompt": True})
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_an_echo_is_of_what_was_kept(client: openai.OpenAI) -> None:
    asked = {"truncate_prompt_tokens": 4}
    reply = client.completions.create(
        model="fake", prompt="a long prompt", max_tokens=0, echo=True, extra_body=asked
    )
    assert reply.choices[0].text == "ompt"
    assert reply.usage is not None and reply.usage.prompt_tokens == 4


def test_a_start_tells_what_is_taken_of_the_models_files(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = [ByteText("plain"), ByteText("tuned", sampling_defaults=DEFAULTS)]
    with caplog.at_level(logging.INFO):
        HttpFace(LoadedTexts(models), ServeOptions()).tell_sampling_defaults()
    [record] = [one for one in caplog.records if one.getMessage() == "sampling_defaults"]
    assert getattr(record, FIELDS) == {
        "model": "tuned",
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_tokens": 50,
    }


def test_a_response_says_what_it_was_sampled_by() -> None:
    body = ResponsesRequest.model_validate({"input": "hi", "top_p": 0.5})
    told = body.with_defaults(DEFAULTS)
    assert (told.temperature, told.top_p) == (0.6, 0.5)
