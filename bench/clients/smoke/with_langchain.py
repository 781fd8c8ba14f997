"""LangChain's classes for OpenAI."""

from typing import Literal

from checks import BASE_URL, MODEL, raises, run
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

TO = {"model": MODEL, "base_url": BASE_URL, "api_key": "none"}
model = ChatOpenAI(**TO, max_completion_tokens=80, temperature=0)


class Person(BaseModel):
    """Who somebody is."""

    name: str = Field(max_length=20)
    mood: Literal["happy", "sad"]


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return "sunny"


def chat() -> None:
    assert model.invoke("Say hello.").content


def stream() -> None:
    assert "".join(str(one.content) for one in model.stream("Say hello."))


def batch() -> None:
    assert len(model.batch(["One.", "Two."])) == 2


def json_schema() -> None:
    made = model.with_structured_output(Person, method="json_schema").invoke("Ann is happy.")
    assert isinstance(made, Person)


def function_calling() -> None:
    made = model.with_structured_output(Person, method="function_calling").invoke("Ann is happy.")
    assert isinstance(made, Person)


def json_mode() -> None:
    short = ChatOpenAI(**TO, max_completion_tokens=200, temperature=0)
    reply = short.bind(response_format={"type": "json_object"}).invoke("Ann as JSON.")
    assert str(reply.content).lstrip().startswith("{")


def any_tool() -> None:
    reply = model.bind_tools([weather], tool_choice="any").invoke("Weather in Bern?")
    assert reply.tool_calls or reply.invalid_tool_calls


def history_of_a_cut_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"ci'}}
    history = [
        HumanMessage("Weather in Bern?"),
        AIMessage("", additional_kwargs={"tool_calls": [call]}),
        ToolMessage("cut", tool_call_id="c1"),
        HumanMessage("Again, please."),
    ]
    assert model.invoke(history).content is not None


def completion() -> None:
    assert OpenAI(**TO, max_tokens=10).invoke("Once upon")


def embeddings() -> None:
    made = OpenAIEmbeddings(**TO, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert len(made) == 2


def responses() -> None:
    made = ChatOpenAI(**TO, use_responses_api=True, max_tokens=20)
    assert made.invoke("Say hello.").content


def overflow() -> None:
    raises(ContextOverflowError, lambda: model.invoke("word " * 20_000))


run(
    chat=chat,
    stream=stream,
    batch=batch,
    json_schema=json_schema,
    function_calling=function_calling,
    json_mode=json_mode,
    any_tool=any_tool,
    history_of_a_cut_call=history_of_a_cut_call,
    completion=completion,
    embeddings=embeddings,
    responses=responses,
    overflow=overflow,
)
