"""Instructor: kinds of answers in three modes."""

from collections.abc import Callable
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import instructor
import openai
from checks import BASE_URL, MODEL, tell
from pydantic import BaseModel, Field

Text = Annotated[str, Field(max_length=20)]
client = openai.OpenAI(base_url=BASE_URL, api_key="none")
MODES = {
    "tools": instructor.Mode.TOOLS,
    "json": instructor.Mode.JSON,
    "json_schema": instructor.Mode.JSON_SCHEMA,
}


class Colour(Enum):
    """A colour."""

    RED = "red"
    BLUE = "blue"


class Flat(BaseModel):
    """A person."""

    name: Text
    age: Annotated[int, Field(ge=0, le=99)]


class Nested(BaseModel):
    """A person with a friend."""

    me: Flat
    friend: Flat


class Listed(BaseModel):
    """Some names."""

    names: Annotated[list[Text], Field(min_length=1, max_length=3)]


class Optionals(BaseModel):
    """A person who may have a nickname."""

    name: Text
    nickname: Text | None = None


class Chosen(BaseModel):
    """A choice."""

    colour: Colour
    size: Literal["small", "large"]


class Numbers(BaseModel):
    """Numbers and a switch."""

    ratio: float
    is_new: bool


class Dated(BaseModel):
    """A day."""

    day: date


class Either(BaseModel):
    """One or the other."""

    what: Flat | Chosen


KINDS = {"flat": Flat, "nested": Nested, "listed": Listed, "optionals": Optionals}
KINDS |= {"chosen": Chosen, "numbers": Numbers, "dated": Dated}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Ann is 30 and likes red. Tell about her."}],
    "max_tokens": 200,
    "temperature": 0,
    "max_retries": 1,
}


def made(mode: str, kind: Any, **more: Any) -> Any:
    asks = instructor.from_openai(client, mode=MODES[mode])
    return asks.chat.completions.create(response_model=kind, **(ASKED | more))


def check(name: str, call: Callable[[], bool]) -> None:
    try:
        tell(name, call())
    except Exception as error:
        tell(name, False, f"{type(error).__name__}: {error}"[:400])


for mode in MODES:
    for name, kind in KINDS.items():
        check(f"{mode}.{name}", lambda mode=mode, kind=kind: isinstance(made(mode, kind), kind))
check("tools.either", lambda: isinstance(made("tools", Either), Either))
check(
    "tools.partial",
    lambda: bool(
        list(
            instructor.from_openai(client, mode=MODES["tools"]).chat.completions.create_partial(
                response_model=Flat, **ASKED
            )
        )
    ),
)
