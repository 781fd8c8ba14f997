"""OpenAI's Agents SDK."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE_URL, MODEL, awaited, run
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
SETTINGS = ModelSettings(max_tokens=80, temperature=0)


class Person(BaseModel):
    """Who somebody is."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


@function_tool
def weather() -> str:
    """Tell the weather."""
    return "sunny"


def agent(kind: type = OpenAIChatCompletionsModel, **more: object) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key="none")
    settings = more.pop("model_settings", SETTINGS)
    made = kind(model=MODEL, openai_client=client)
    return Agent(
        name="helper", instructions="Be brief.", model=made, model_settings=settings, **more
    )


async def chat() -> None:
    assert (await Runner.run(agent(), "Say hello.")).final_output


async def responses() -> None:
    assert (await Runner.run(agent(OpenAIResponsesModel), "Say hello.")).final_output


async def output_type() -> None:
    told = await Runner.run(agent(output_type=Person), "Ann is 30.")
    assert isinstance(told.final_output, Person)


async def output_type_of_responses() -> None:
    told = await Runner.run(agent(OpenAIResponsesModel, output_type=Person), "Ann is 30.")
    assert isinstance(told.final_output, Person)


async def stream() -> None:
    told = Runner.run_streamed(agent(), "Say hello.")
    assert [event async for event in told.stream_events()]


async def stream_of_responses() -> None:
    told = Runner.run_streamed(agent(OpenAIResponsesModel), "Say hello.")
    assert [event async for event in told.stream_events()]


async def required_tool_without_parameters() -> None:
    settings = ModelSettings(max_tokens=60, temperature=0, tool_choice="required")
    told = await Runner.run(
        agent(tools=[weather], model_settings=settings), "Weather?", max_turns=2
    )
    assert any("sunny" in str(item.to_input_item()) for item in told.new_items)


run(
    chat=awaited(chat),
    responses=awaited(responses),
    output_type=awaited(output_type),
    output_type_of_responses=awaited(output_type_of_responses),
    stream=awaited(stream),
    stream_of_responses=awaited(stream_of_responses),
    required_tool_without_parameters=awaited(required_tool_without_parameters),
)
