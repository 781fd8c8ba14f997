"""Outlines, as a client of OpenAI's and of vLLM's API."""

import json
import re
from typing import Literal

import openai
import outlines
from checks import BASE_URL, MODEL, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE_URL, api_key="none")
as_openai = outlines.from_openai(client, MODEL)
as_vllm = outlines.from_vllm(client, MODEL)


class Person(BaseModel):
    """Who somebody is."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


def text() -> None:
    assert as_openai("Say hello.", max_tokens=20)


def schema_of_openai() -> None:
    Person.model_validate_json(as_openai("Ann is 30.", Person, max_tokens=80))


def schema_of_vllm() -> None:
    Person.model_validate_json(as_vllm("Ann is 30.", Person, max_tokens=80))


def choice_of_vllm() -> None:
    assert as_vllm("Happy?", Literal["yes", "no"], max_tokens=10) in ("yes", "no")


def regex_of_vllm() -> None:
    made = as_vllm("A number.", outlines.types.Regex(r"[0-9]{3}"), max_tokens=10)
    assert re.fullmatch(r"[0-9]{3}", made), made


def grammar_of_vllm() -> None:
    made = as_vllm("Yes?", outlines.types.CFG('start: "yes" | "no"'), max_tokens=10)
    assert made in ("yes", "no"), made


def stream() -> None:
    assert "".join(as_vllm.stream("Say hello.", max_tokens=20))


def dictionary() -> None:
    assert isinstance(json.loads(as_vllm("Ann is 30.", Person, max_tokens=80)), dict)


run(
    text=text,
    schema_of_openai=schema_of_openai,
    schema_of_vllm=schema_of_vllm,
    choice_of_vllm=choice_of_vllm,
    regex_of_vllm=regex_of_vllm,
    grammar_of_vllm=grammar_of_vllm,
    stream=stream,
    dictionary=dictionary,
)
