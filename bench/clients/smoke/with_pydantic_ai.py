"""Pydantic AI."""

from checks import BASE_URL, MODEL, awaited, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key="none")
chat_model = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"max_tokens": 80, "temperature": 0}


class Person(BaseModel):
    """Who somebody is."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


def text() -> None:
    assert Agent(chat_model, model_settings=SETTINGS).run_sync("Say hello.").output


def native_output() -> None:
    agent = Agent(chat_model, output_type=NativeOutput(Person), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Ann is 30.").output, Person)


def tool_output() -> None:
    agent = Agent(chat_model, output_type=ToolOutput(Person), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Ann is 30.").output, Person)


async def stream() -> None:
    agent = Agent(chat_model, model_settings=SETTINGS)
    async with agent.run_stream("Say hello.") as result:
        assert [one async for one in result.stream_text()]


def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=provider)
    assert Agent(model, model_settings=SETTINGS).run_sync("Say hello.").output


def conversation() -> None:
    agent = Agent(chat_model, model_settings=SETTINGS)
    first = agent.run_sync("Say hello.")
    assert agent.run_sync("Again.", message_history=first.all_messages()).output


run(
    text=text,
    native_output=native_output,
    tool_output=tool_output,
    stream=awaited(stream),
    responses=responses,
    conversation=conversation,
)
