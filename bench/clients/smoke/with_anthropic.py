"""Anthropic's own client."""

import anthropic
from checks import BASE_URL, MODEL, raises, run

client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="none", max_retries=0)
HI = [{"role": "user", "content": "Say hello."}]
TOOLS = [
    {
        "name": "weather",
        "description": "tells the weather",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    }
]


def message() -> None:
    told = client.messages.create(model=MODEL, max_tokens=20, messages=HI)
    assert told.content[0].text and told.usage.output_tokens > 0


def system_and_cache_control() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.create(model=MODEL, max_tokens=20, system=system, messages=HI).content


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=20, messages=HI) as told:
        assert "".join(told.text_stream)
        assert told.get_final_message().stop_reason in ("end_turn", "max_tokens")


def tool() -> None:
    told = client.messages.create(
        model=MODEL,
        max_tokens=80,
        messages=HI,
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    [call] = [block for block in told.content if block.type == "tool_use"]
    assert told.stop_reason == "tool_use" and set(call.input) == {"city"}


def streamed_tool() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=80,
        messages=HI,
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as told:
        found = told.get_final_message()
    assert [block.name for block in found.content if block.type == "tool_use"] == ["weather"]


def tool_result() -> None:
    history = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}],
        },
    ]
    assert client.messages.create(model=MODEL, max_tokens=20, messages=history, tools=TOOLS).content


def stop_sequence() -> None:
    told = client.messages.create(
        model=MODEL, max_tokens=60, messages=HI, stop_sequences=["e", "a"]
    )
    assert told.stop_reason == "stop_sequence" and told.stop_sequence in ("e", "a")


def count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=HI).input_tokens > 3


def bad_request() -> None:
    call = lambda: client.messages.create(model=MODEL, max_tokens=0, messages=HI)  # noqa: E731
    raises(anthropic.BadRequestError, call, "max_tokens")


def unknown_model() -> None:
    call = lambda: client.messages.create(model="nobody", max_tokens=5, messages=HI)  # noqa: E731
    raises(anthropic.NotFoundError, call)


run(
    message=message,
    system_and_cache_control=system_and_cache_control,
    stream=stream,
    tool=tool,
    streamed_tool=streamed_tool,
    tool_result=tool_result,
    stop_sequence=stop_sequence,
    count_tokens=count_tokens,
    bad_request=bad_request,
    unknown_model=unknown_model,
)
