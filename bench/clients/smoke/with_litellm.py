"""LiteLLM."""

import litellm
from checks import BASE_URL, MODEL, raises, run

TO = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none", "max_tokens": 60}
HI = [{"role": "user", "content": "Say hello."}]
LONG = [{"role": "user", "content": "word " * 20_000}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOLS = [{"type": "function", "function": {"name": "person", "parameters": SCHEMA}}]


def chat() -> None:
    reply = litellm.completion(messages=HI, **TO)
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens > 0


def stream() -> None:
    pieces = list(litellm.completion(messages=HI, stream=True, **TO))
    assert "".join(one.choices[0].delta.content or "" for one in pieces)


def text() -> None:
    to = TO | {"model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(prompt="Once upon", **to).choices[0].text


def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    reply = litellm.completion(messages=HI, response_format=form, **TO)
    assert reply.choices[0].message.content.startswith("{")


def required_tool() -> None:
    reply = litellm.completion(messages=HI, tools=TOOLS, tool_choice="required", **TO)
    assert reply.choices[0].message.tool_calls[0].function.name == "person"


def embedding() -> None:
    to = {key: value for key, value in TO.items() if key != "max_tokens"}
    reply = litellm.embedding(input=["hello", "world"], encoding_format="float", **to)
    assert len(reply.data) == 2


def overflow() -> None:
    raises(litellm.ContextWindowExceededError, lambda: litellm.completion(messages=LONG, **TO))


def overflow_of_the_answer() -> None:
    to = TO | {"max_tokens": 1_000_000}
    raises(litellm.ContextWindowExceededError, lambda: litellm.completion(messages=HI, **to))


def responses() -> None:
    to = {key: value for key, value in TO.items() if key != "max_tokens"}
    assert litellm.responses(input="Say hello.", max_output_tokens=20, **to).output


run(
    chat=chat,
    stream=stream,
    text=text,
    json_schema=json_schema,
    required_tool=required_tool,
    embedding=embedding,
    overflow=overflow,
    overflow_of_the_answer=overflow_of_the_answer,
    responses=responses,
)
