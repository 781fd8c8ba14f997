"""Every field that OpenAI's client and vLLM know is honoured, ignored, or refused by its name."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from ollama import Options
from ollama._types import ChatRequest as TheirChatRequest
from ollama._types import EmbeddingsRequest as TheirEmbeddingsRequest
from ollama._types import EmbedRequest as TheirEmbedRequest
from ollama._types import GenerateRequest as TheirGenerateRequest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import ChatRequest
from kvell.server.api.schemas.ollama.requests import OllamaOptions
from kvell.server.api.schemas.request_body import RequestBody
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.logs.lines import MOST_TOLD, OncePerName
from kvell.server.text.text_bounds import AnswerRoom
from scripts.reference.http.request_fields import BODIES, PAGE, page

ROOM = AnswerRoom(100, 100)
CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, MESSAGES, *OLLAMAS = BODIES
OLLAMA_CHAT, GENERATE, EMBED, OLD_EMBEDDINGS = OLLAMAS
LEAST: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    EMBEDDINGS: {"input": "hi"},
    OLLAMA_CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    GENERATE: {"model": "m", "prompt": "hi"},
    MESSAGES: {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
}
OPENAI: Mapping[str, Any] = {
    CHAT: chat_create_params.CompletionCreateParamsBase,
    COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
    RESPONSES: response_create_params.ResponseCreateParamsBase,
    EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
}
SAMPLING = """
    frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty
    watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_special_tokens
    response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval model guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern logits_processors
"""
VLLM: Mapping[str, str] = {
    CHAT: SAMPLING
    + """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
    include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    """,
    COMPLETIONS: SAMPLING + " prompt suffix best_of prompt_embeds",
    RESPONSES: """
    background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature
    text tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens
    include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority cache_salt
    enable_response_messages previous_input_messages previous_response structured_outputs
    repetition_penalty seed stop ignore_eos vllm_xargs
    """,
    EMBEDDINGS: """
    model input encoding_format dimensions user truncate_prompt_tokens add_special_tokens priority
    request_id normalize embed_dtype endianness additional_data messages mm_processor_kwargs
    cache_salt use_activation
    """,
}
"""Names of the fields of vLLM's request bodies (0.13 to 0.26)."""


def test_every_field_of_ollamas_client_is_known() -> None:
    assert set(TheirChatRequest.model_fields) <= known(OLLAMA_CHAT)
    ours = {*OllamaOptions.model_fields, *OllamaOptions.others}
    assert set(Options.model_fields) <= ours
    images = {"width", "height", "steps"}  # of models that make images
    assert set(TheirGenerateRequest.model_fields) - images <= known(GENERATE)
    assert set(TheirEmbedRequest.model_fields) <= known(EMBED)
    assert set(TheirEmbeddingsRequest.model_fields) <= known(OLD_EMBEDDINGS)


def body(path: str, **fields: Any) -> RequestBody:
    return BODIES[path].model_validate(LEAST[path] | fields)


def known(path: str) -> set[str]:
    model = BODIES[path]
    return {one.alias or name for name, one in model.model_fields.items()} | set(model.others)


@pytest.mark.parametrize("path", OPENAI)
def test_every_field_of_openais_client_and_of_vllm_is_known(path: str) -> None:
    assert set(OPENAI[path].__annotations__) - known(path) == set()
    assert set(VLLM[path].split()) - known(path) == set()


@pytest.mark.parametrize("path", BODIES)
def test_no_field_is_both_served_and_not(path: str) -> None:
    assert set(BODIES[path].model_fields) & set(BODIES[path].others) == set()


def test_the_page_of_all_fields_says_what_the_code_says() -> None:
    again = "run python -m scripts.reference.http.request_fields"
    assert PAGE.read_text() == page(), again


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_null_is_the_default_of_every_field(path: str) -> None:
    needed = {*LEAST[path], "max_tokens"}  # without it a completion has sixteen tokens
    sent, bare = body(path, **dict.fromkeys(known(path) - needed)), body(path)
    for one in (sent, bare):
        assert one.unknown_fields() == set()
    assert _sampling(sent) == _sampling(bare)


def _sampling(sent: RequestBody) -> Any:
    asked: Any = sent.chat() if isinstance(sent, ResponsesRequest) else sent
    template = asked.template_fields() if isinstance(asked, ChatRequest) else {}
    return asked.sampling(ROOM), asked.session(), asked.choices(), template


TAKEN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"verbosity": "low"}),
    (CHAT, {"functions": None, "function_call": None}),
    (CHAT, {"functions": [], "function_call": "auto"}),
    (CHAT, {"prediction": {"type": "content", "content": "hi"}}),
    (CHAT, {"audio": None, "modalities": ["text"]}),
    (CHAT, {"web_search_options": None}),
    (CHAT, {"include_reasoning": True}),
    (CHAT, {"chat_template": None}),
    (CHAT, {"request_id": "mine", "guided_decoding_backend": "xgrammar"}),
    (CHAT, {"user": 7, "metadata": {"a": 1}, "store": True, "service_tier": "flex"}),
    (CHAT, {"stream_options": {"include_usage": None}}),
    (CHAT, {"vllm_xargs": {}, "kv_transfer_params": None, "stream_interval": 4}),
    (COMPLETIONS, {"ignore_eos": None, "stop": "", "seed": -1, "suffix": ""}),
    (COMPLETIONS, {"stop": [""]}),
    (RESPONSES, {"client_metadata": {"a": "b"}, "truncation": "auto"}),
    (RESPONSES, {"include": ["file_search_call.results"], "prompt_cache_options": {}}),
    (RESPONSES, {"priority": 3, "deadline_seconds": 5.0, "ignore_eos": None}),
    (RESPONSES, {"metadata": {"a": 1}, "store": True, "user": 7}),
    (MESSAGES, {"metadata": {"user_id": None}, "thinking": None, "mcp_servers": []}),
    (EMBEDDINGS, {"normalize": True, "embed_dtype": "float32", "user": 7}),
]


@pytest.mark.parametrize(("path", "fields"), TAKEN)
def test_what_changes_no_answer_or_asks_for_the_default_is_taken(
    path: str, fields: dict[str, Any]
) -> None:
    sent = body(path, **fields)
    assert sent.unknown_fields() == set()
    if path in (CHAT, COMPLETIONS):
        assert sent.sampling(ROOM) == body(path).sampling(ROOM)  # type: ignore[attr-defined]


def test_responses_hand_on_what_schedules_them() -> None:
    chat = body(RESPONSES, priority=3, deadline_seconds=5.0, session_id="s").chat()  # type: ignore[attr-defined]
    assert (chat.priority, chat.deadline_seconds, chat.session()) == (3, 5.0, "s")


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"functions": [{"name": "f"}]}),
    (CHAT, {"function_call": {"name": "f"}}),
    (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}),
    (CHAT, {"web_search_options": {}}),
    (CHAT, {"chat_template": "{{ messages }}"}),
    (CHAT, {"return_tokens_as_token_ids": True}),
    (CHAT, {"mm_processor_kwargs": {"num_crops": 4}}),
    (CHAT, {"echo": True}),
    (CHAT, {"moderation": {"mode": "strict"}}),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}),
    (COMPLETIONS, {"guided_whitespace_pattern": r"\s"}),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}),
    (RESPONSES, {"previous_response": {"id": "resp_1"}}),
    (EMBEDDINGS, {"normalize": False}),
    (MESSAGES, {"stop": ["a"]}),
    (RESPONSES, {"max_tokens": 3}),
    (EMBEDDINGS, {"truncate_prompt_tokens": 8}),
]


@pytest.mark.parametrize(("path", "fields"), REFUSED)
def test_what_changes_an_answer_and_is_not_served_is_refused_by_name(
    path: str, fields: dict[str, Any]
) -> None:
    [name] = fields
    with pytest.raises(ChangeSomething) as caught:
        body(path, **fields)
    assert caught.value.field == name
    assert caught.value.remedy


def test_true_is_not_one_and_zero_is_not_false() -> None:
    with pytest.raises(ChangeSomething, match="echo=0"):
        body(CHAT, echo=0)


def test_fields_that_nobody_knows_are_named_by_their_path() -> None:
    content = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    sent = body(
        CHAT,
        messages=[{"role": "user", "content": content, "weight": 1}, LEAST[CHAT]["messages"][0]],
        colour="red",
        stream_options={"include_usage": True, "sparkle": 1},
        user="me",
    )
    parts = {"messages[].weight", "messages[].content[].cache_control"}
    assert sent.unknown_fields() == {"colour", "stream_options.sparkle"} | parts
    assert body(COMPLETIONS, prompt=[1, 2, 3]).unknown_fields() == set()
    assert body(MESSAGES, betas=["x"]).unknown_fields() == {"betas"}


def test_each_unknown_field_is_told_once_and_not_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ignored = OncePerName("field_ignored", "field")
    with caplog.at_level(logging.INFO, "kvell"):
        for _ in range(3):
            ignored.note({"colour", "sparkle"})
        assert [record.getMessage() for record in caplog.records] == ["field_ignored"] * 2
        for number in range(1000):
            ignored.note({f"field-{number}" + "x" * 1000})
    assert len(caplog.records) == MOST_TOLD
    assert all(len(str(record.__dict__)) < 2000 for record in caplog.records)


def test_deprecated_and_present_names_of_a_session() -> None:
    assert body(CHAT, session_id="a").session() == "a"  # type: ignore[attr-defined]
    assert body(CHAT, session_id="a", prompt_cache_key="b").session() == "b"  # type: ignore[attr-defined]


def test_a_limit_that_is_refused_later_has_the_name_that_was_sent() -> None:
    sent = body(CHAT, max_completion_tokens=5)
    assert sent.name_sent("max_tokens") == "max_completion_tokens"
    assert body(CHAT, max_tokens=5).name_sent("max_tokens") == "max_tokens"
    assert sent.name_sent("temperature") == "temperature"
