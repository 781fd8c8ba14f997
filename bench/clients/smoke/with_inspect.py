"""Inspect."""

import tempfile

from checks import BASE_URL, MODEL, run
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.util import json_schema
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Who somebody is."""

    name: str = Field(max_length=20)
    age: int


def ended(text: str = "Say hello.", **config: object) -> object:
    model = get_model(f"openai-api/kvell/{MODEL}", base_url=BASE_URL, api_key="none")
    made = Task(
        dataset=[Sample(input=text, target="e")],
        scorer=includes(),
        config=GenerateConfig(**{"max_tokens": 60, "max_retries": 0, "timeout": 120} | config),
    )
    with tempfile.TemporaryDirectory() as logs:
        [log] = eval(made, model=model, log_dir=logs, display="none")
        assert log.status == "success", log.error and log.error.message
        return log.samples[0].output  # samples are read from the log's file


def generate() -> None:
    assert ended().completion


def schema() -> None:
    form = ResponseSchema(name="person", json_schema=json_schema(Person))
    Person.model_validate_json(ended(response_schema=form).completion)


def overflow() -> None:
    assert ended("word " * 20_000).stop_reason == "model_length"


def logprobs() -> None:
    assert ended(logprobs=True, top_logprobs=2).choices[0].logprobs


run(generate=generate, schema=schema, overflow=overflow, logprobs=logprobs)
