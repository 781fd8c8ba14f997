"""What the build refuses: things that are public and not described, or described by a question."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
import pytest

from kvell.engine.setup.engine_settings import EngineSettings
from kvell.memory import GroupKind, LayerSpec, MemoryCore
from scripts.reference import complaints
from scripts.reference.complaints import of_command, of_document, of_object, of_parameters, of_text
from scripts.reference.http.pages import openapi_document
from scripts.reference.python.public import PUBLIC


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Return it.", []),
        ("Return whether ``a?b`` holds.", []),
        ("", ["x: no docstring"]),
        ("Is it there?", ["x: its docstring asks instead of telling"]),
        ("Is it there?\n\nSometimes.", ["x: its docstring asks instead of telling"]),
        ("Whether it is.\n\n:param y: is it?", ["x: its docstring asks instead of telling"]),
    ],
)
def test_a_docstring_is_there_and_tells(text: str, told: list[str]) -> None:
    assert list(of_text("x", text)) == told


def test_every_field_of_a_class_is_described() -> None:
    assert list(of_parameters("L", LayerSpec, LayerSpec.__doc__ or "")) == []
    told = list(of_parameters("L", LayerSpec, "Sizes.\n\n:param index: of the layer.\n"))
    assert "L: its docstring has no :param kind:" in told
    assert not any(":param index:" in line for line in told)
    assert len(told) == len(LayerSpec.__dataclass_fields__) - 1


def test_fields_may_be_described_below_them_or_in_a_class_that_is_extended() -> None:
    @dataclass(frozen=True)
    class Further(EngineSettings):
        undescribed: int = 0

    assert list(of_parameters("E", EngineSettings, EngineSettings.__doc__ or "")) == []
    [told] = of_parameters("F", Further, "Settings.")
    assert told == "F: its docstring has no :param undescribed:"


@pytest.mark.parametrize("value", [GroupKind, MemoryCore])
def test_enums_and_protocols_take_no_parameters(value: type) -> None:
    assert list(of_parameters("x", value, "Nothing of them.")) == []


def test_members_are_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(of_object("kvell.memory.WithholdingCore")) == []
    from kvell.memory import WithholdingCore

    monkeypatch.setattr(WithholdingCore.restore, "__doc__", "Have they changed places?")
    monkeypatch.setattr(WithholdingCore.withhold, "__doc__", None)
    assert list(of_object("kvell.memory.WithholdingCore")) == [
        "kvell.memory.WithholdingCore.withhold: no docstring",
        "kvell.memory.WithholdingCore.restore: its docstring asks instead of telling",
    ]


def test_an_exported_name_must_be_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    public = [name for name in PUBLIC if name != "kvell.memory.audit"]
    monkeypatch.setattr(complaints, "PUBLIC", public)
    assert "kvell.memory.audit: exported, but on no page" in complaints.complaints()


def test_commands_and_options_have_help() -> None:
    @click.group()
    def tool() -> None:
        """Do it."""

    @tool.command()
    @click.option("--loud", is_flag=True)
    @click.option("--secret", hidden=True)
    def shout(loud: bool, secret: str) -> None:
        pass

    @tool.command(hidden=True)
    def whisper() -> None:
        pass

    assert list(of_command(tool, "tool")) == ["tool shout: no help", "tool shout --loud: no help"]


def document(description: str, **fields: Mapping[str, Any]) -> dict[str, Any]:
    operation = {"description": description, "responses": {}}
    schemas = {"ChatRequest": {"properties": fields}}
    return {"paths": {"/x": {"get": operation}}, "components": {"schemas": schemas}}


@pytest.mark.parametrize("text", ["", "``GET /x``.", "``GET /x``"])
def test_a_route_says_more_than_its_name(text: str) -> None:
    told = "GET /x: its handler's docstring does not say what it does"
    assert list(of_document(document(text))) == [told]
    assert list(of_document(document("Tell x."))) == []


def test_a_route_names_statuses_and_not_exceptions() -> None:
    [told] = of_document(document("Tell x.\n\n:raises TryLater: if it cannot."))
    assert told.startswith("GET /x: its handler's docstring is for Python")


def test_fields_of_bodies_have_a_meaning() -> None:
    fields = {"model": {"type": "string"}, "nonsense": {}, "other": {"const": "x"}}
    told = "ChatRequest.nonsense: no text below it in the code"
    assert list(of_document(document("Tell x.", **fields))) == [told]
    assert list(of_document(openapi_document())) == []
