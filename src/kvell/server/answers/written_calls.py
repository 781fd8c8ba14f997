"""The formats' calls, for grammars that admit calls instead of a response format.

If a format writes arguments as JSON, they follow the function's schema.  In other formats, any
text may follow the beginning of a call, as in an unconstrained answer.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_Make = Callable[[str, Schema], Iterator[CallForm]]


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
    for start in ("", pythonic.START):
        yield CallForm(f"{start}[{name}(", within=(pythonic.END,))


def _qwen3_coder(name: str, _arguments: Schema) -> Iterator[CallForm]:
    tags = (qwen3_coder.START, qwen3_coder.END)
    yield CallForm(f"{tags[0]}\n{qwen3_coder.FUNCTION}{name}>\n", within=tags)


def _begun_by(starts: Sequence[str], *within: str) -> _Make:
    """Return the forms of calls of which only the beginning is known, for any function.

    :param within: special tokens that may follow.
    """
    return lambda _name, _arguments: (CallForm(start, within=within) for start in starts)


def _marked(tokens: marked_calls.CallTokens) -> _Make:
    others = (tokens.call_begin, *tokens.separators, tokens.call_end, tokens.calls_end)
    return _begun_by((tokens.calls_begin,), *others)


def _tagged(tags: tuple[tuple[str, ...], tuple[str, ...]]) -> _Make:
    return _begun_by(tags[0], *tags[0], *tags[1])


def _glm45(name: str, _arguments: Schema) -> Iterator[CallForm]:
    tags = (glm45.KEY, glm45.KEY_END, glm45.VALUE, glm45.VALUE_END)
    yield CallForm(f"{glm45.START}{name}", within=(glm45.START, glm45.END, *tags))


def _seed_oss(name: str, _arguments: Schema) -> Iterator[CallForm]:
    tags = (qwen3_coder.SEED_START, qwen3_coder.SEED_END)
    yield CallForm(f"{tags[0]}\n{qwen3_coder.FUNCTION}{name}>\n", within=tags)


_FORMS: Mapping[str, tuple[_Make, str]] = MappingProxyType(
    {
        "deepseek_v3": (_marked(marked_calls.DEEPSEEK), ""),
        "deepseek_v31": (_marked(marked_calls.DEEPSEEK), ""),
        "gemma4": (_begun_by((gemma4.START,), gemma4.START, gemma4.END, gemma4.QUOTE), ""),
        "glm45": (_glm45, ""),
        "glm47": (_glm45, ""),
        "granite": (_tagged(tagged_lists.GRANITE), ""),
        "hermes": (_hermes, "\n"),
        "jamba": (_tagged(tagged_lists.JAMBA), ""),
        "kimi_k2": (_marked(marked_calls.KIMI_K2), ""),
        "lfm2": (_begun_by(python_calls.LFM2[:1], *python_calls.LFM2), ""),
        "llama3_json": (_llama3_json, "; "),
        "mistral": (_mistral, ""),
        "olmo3": (_begun_by(python_calls.OLMO3[:1], *python_calls.OLMO3), ""),
        "phi4_mini_json": (_tagged(tagged_lists.PHI4_MINI), ""),
        "pythonic": (_pythonic, ""),
        "qwen3_coder": (_qwen3_coder, ""),
        "seed_oss": (_seed_oss, ""),
    }
)
