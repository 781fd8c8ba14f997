"""What is public and not described: each is a line, and the build fails if there is one."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import click

import kvell
from kvell import errors, memory
from kvell.cli.main import root
from scripts.reference.http.fields import field_text
from scripts.reference.http.pages import openapi_document, routes
from scripts.reference.metric_pages import known_metrics
from scripts.reference.python.docstrings import (
    docstring,
    field_texts,
    found,
    parameter_texts,
    parameters,
    public_members,
)
from scripts.reference.python.public import PUBLIC

QUESTION = re.compile(r"\?(?:$|\s)")
TITLE_ALONE = re.compile(r"``[A-Z]+ [^`]+``\.?")


def complaints() -> list[str]:
    """Return everything that lacks a description, or has one that asks instead of telling."""
    return [
        *_left_out(),
        *(line for name in PUBLIC for line in of_object(name)),
        *of_command(root, "kvell"),
        *of_document(openapi_document()),
        *(f"metric {one.name}: no help" for one in known_metrics() if not one.text),
    ]


def exported() -> list[str]:
    """Return all names that the packages export, and all errors of ``kvell.errors``."""
    own_errors = [name for name, one in vars(errors).items() if inspect.isclass(one)]
    return [
        *(f"kvell.{name}" for name in kvell.__all__ if name not in {*kvell.SAME, "__version__"}),
        *(f"kvell.memory.{name}" for name in memory.__all__),
        *(f"kvell.errors.{name}" for name in own_errors),
    ]


def _left_out() -> Iterator[str]:
    return (f"{name}: exported, but on no page" for name in exported() if name not in PUBLIC)


def of_object(name: str) -> Iterator[str]:
    """Yield what is wrong with the docstrings of a public object and of its members."""
    value, text = found(name), docstring(name)
    yield from of_text(name, text)
    if inspect.isclass(value):
        yield from of_parameters(name, value, text)
        for member, one in public_members(value).items():
            yield from of_text(f"{name}.{member}", inspect.getdoc(one) or "")


def of_text(name: str, text: str) -> Iterator[str]:
    """Yield whether a docstring is missing, or asks."""
    if not text:
        yield f"{name}: no docstring"
    if QUESTION.search(text):
        yield f"{name}: its docstring asks instead of telling"


def of_parameters(name: str, value: Any, text: str) -> Iterator[str]:
    """Yield the fields that a class takes and that its docstring does not describe."""
    described = parameter_texts(text) | field_texts(value)
    for one in parameters(value):
        if one not in described:
            yield f"{name}: its docstring has no :param {one}:"


def of_command(command: click.Command, program: str) -> Iterator[str]:
    """Yield the commands and options without help, those below it too."""
    if not command.help:
        yield f"{program}: no help"
    for one in command.params:
        if isinstance(one, click.Option) and not one.hidden and not one.help:
            yield f"{program} {one.opts[-1]}: no help"
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from of_command(below, f"{program} {name}")


def of_document(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the routes and fields of an OpenAPI document without a description."""
    for route in routes(document):
        if not route.description or TITLE_ALONE.fullmatch(route.description):
            yield f"{route.title}: its handler's docstring does not say what it does"
        if ":raises" in route.description:
            yield f"{route.title}: its handler's docstring is for Python; name the status instead"
    for name, schema in document["components"]["schemas"].items():
        for field, one in schema.get("properties", {}).items():
            if "const" not in one and not field_text(name, field).text:
                yield f"{name}.{field}: no text below it in the code"
