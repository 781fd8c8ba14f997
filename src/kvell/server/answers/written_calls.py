"""The formats' calls, for grammars that admit calls instead of a response format.

If a format writes arguments as JSON, they follow the function's schema.  In other formats, any
text may follow the beginning of a call, as in an unconstrained answer.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kvell.engine.protocol.schemas.references import Schema, within
from kvell.engine.protocol.structured_outputs import CallForm, Calls
from kvell.server.answers.forced import Tools, arguments_schema, call_schema
from kvell.server.answers.formats import (
    gemma4,
    glm45,
    hermes,
    llama3_json,
    marked_calls,
    mistral,
    python_calls,
    pythonic,
    qwen3_coder,
    tagged_lists,
)

_LFM2_START = "<|tool_call_start|>"


def written_calls(parser: str, tools: Tools, *, parallel: bool) -> Calls | None:
    """Return the form of calls of these functions; None if the parser's format has none.

    :param parser: name of the tool parser.
    :param parallel: whether the answer may have several calls.
    """
    if parser not in _FORMS or not tools:
        return None
    make, between = _FORMS[parser]
    forms = [
        form for tool in tools for form in make(tool["function"]["name"], arguments_schema(tool))
    ]
    return Calls(tuple(dict.fromkeys(forms)), between, repeats=parallel)


def _hermes(name: str, arguments: Schema) -> Iterator[CallForm]:
    begin = f'{hermes.START}\n{{"name": "{name}", "arguments": '
    yield CallForm(begin, json.dumps(arguments), f"}}\n{hermes.END}")


def _llama3_json(name: str, arguments: Schema) -> Iterator[CallForm]:
    whole = call_schema(name, within(arguments, "#/properties/parameters"))
    yield CallForm("", json.dumps(whole))
    yield CallForm(f'{llama3_json.TAG}{{"name": "{name}", "parameters": ')


def _mistral(name: str, arguments: Schema) -> Iterator[CallForm]:
    schema = json.dumps(arguments)
    yield CallForm(f"{mistral.START}{name}", schema)
    yield CallForm(f"{mistral.START}{name}[ARGS]", schema)
    for space in ("", " "):
        yield CallForm(f'{mistral.START}{space}[{{"name": "')


def _pythonic(name: str, _arguments: Schema) -> Iterator[CallForm]:
    for start in ("", pythonic.START, _LFM2_START):
        yield CallForm(f"{start}[{name}(")


def _qwen3_coder(name: str, _arguments: Schema) -> Iterator[CallForm]:
    yield CallForm(f"{qwen3_coder.START}\n{qwen3_coder.FUNCTION}{name}>\n")


def _begun_by(*starts: str) -> Callable[[str, Schema], Iterator[CallForm]]:
    """Return the forms of calls of which only the beginning is known, for any function."""
    return lambda _name, _arguments: map(CallForm, starts)


def _glm45(name: str, _arguments: Schema) -> Iterator[CallForm]:
    yield CallForm(f"{glm45.START}{name}")


def _seed_oss(name: str, _arguments: Schema) -> Iterator[CallForm]:
    yield CallForm(f"{qwen3_coder.SEED_START}\n{qwen3_coder.FUNCTION}{name}>\n")


_DEEPSEEK = _begun_by(marked_calls.DEEPSEEK.calls_begin)
_FORMS: Mapping[str, tuple[Callable[[str, Schema], Iterator[CallForm]], str]] = MappingProxyType(
    {
        "deepseek_v3": (_DEEPSEEK, ""),
        "deepseek_v31": (_DEEPSEEK, ""),
        "gemma4": (_begun_by(gemma4.START), ""),
        "glm45": (_glm45, ""),
        "glm47": (_glm45, ""),
        "granite": (_begun_by(*tagged_lists.GRANITE[0]), ""),
        "hermes": (_hermes, "\n"),
        "jamba": (_begun_by(*tagged_lists.JAMBA[0]), ""),
        "kimi_k2": (_begun_by(marked_calls.KIMI_K2.calls_begin), ""),
        "lfm2": (_begun_by(python_calls.LFM2[0]), ""),
        "llama3_json": (_llama3_json, "; "),
        "mistral": (_mistral, ""),
        "olmo3": (_begun_by(python_calls.OLMO3[0]), ""),
        "phi4_mini_json": (_begun_by(*tagged_lists.PHI4_MINI[0]), ""),
        "pythonic": (_pythonic, ""),
        "qwen3_coder": (_qwen3_coder, ""),
        "seed_oss": (_seed_oss, ""),
    }
)
