"""Parsers by vLLM's names, and the default parsers for a model's chat template."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from kvell.engine.protocol.schemas.references import Schema, within
from kvell.engine.protocol.structured_outputs import CallForm, Calls, Reasoning
from kvell.errors import ChangeSomething
from kvell.server.answers.forced import Tools, arguments_schema, call_schema
from kvell.server.answers.formats import (
    gemma4,
    glm45,
    harmony,
    hermes,
    llama3_json,
    marked_calls,
    mistral,
    pythonic,
    qwen3_coder,
    tagged_lists,
    thinking,
)
from kvell.server.answers.formats.thinking import Thinking, ThinkingTags
from kvell.server.answers.reading.json_calls import CallObject
from kvell.server.answers.reading.modes import Mode, ModeParser, PlainText

_Make = Callable[[str, Schema], Iterator[CallForm]]
"""Returns the forms of calls of a function with arguments of a schema."""


@dataclass(frozen=True)
class _ToolFormat:
    """A format of calls.

    :param is_special: whether these are special tokens, which the detokenizer must keep.
    :param forms: the calls for grammars that admit calls instead of a response format; None if
        there are none.  If a format writes arguments as JSON, they follow the function's schema.
        In other formats, any text may follow the beginning of a call.
    """

    make: Callable[[Tools], Mode]
    starts: tuple[str, ...] = ()
    is_special: bool = False
    forms: _Make | None = None
    between: str = ""


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


def _begun_by(starts: Sequence[str], *within: str) -> _Make:
    """Return the forms of calls of which only the beginning is known, for any function.

    :param within: special tokens that may follow.
    """
    return lambda _name, _arguments: (CallForm(start, within=within) for start in starts)


def _glm45(name: str, _arguments: Schema) -> Iterator[CallForm]:
    tags = (glm45.KEY, glm45.KEY_END, glm45.VALUE, glm45.VALUE_END)
    yield CallForm(f"{glm45.START}{name}", within=(glm45.START, glm45.END, *tags))


def _marked(tokens: marked_calls.CallTokens) -> _ToolFormat:
    starts = (tokens.calls_begin, tokens.call_begin)
    others = (tokens.call_begin, *tokens.separators, tokens.call_end, tokens.calls_end)
    forms = _begun_by(starts[:1], *others)
    return _ToolFormat(lambda _: marked_calls.MarkedCalls(tokens), starts, True, forms)


def _tagged(
    tags: tuple[tuple[str, ...], tuple[str, ...]],
    call: type[CallObject] | type[pythonic.PythonCall] = CallObject,
) -> _ToolFormat:
    forms = _begun_by(tags[0], *tags[0], *tags[1])
    return _ToolFormat(lambda _: tagged_lists.TaggedList(tags, call), tags[0], True, forms)


def _functions(tags: tuple[str, str]) -> _ToolFormat:
    def forms(name: str, _arguments: Schema) -> Iterator[CallForm]:
        yield CallForm(f"{tags[0]}\n{qwen3_coder.FUNCTION}{name}>\n", within=tags)

    return _ToolFormat(lambda tools: qwen3_coder.Qwen3Coder(tools, tags), tags[:1], forms=forms)


_GEMMA = _begun_by((gemma4.START,), gemma4.START, gemma4.END, gemma4.QUOTE)
_GLM = _ToolFormat(glm45.Glm45, (glm45.START,), forms=_glm45)
_TOOL_FORMATS: Mapping[str, _ToolFormat] = MappingProxyType(
    {
        "deepseek_v3": _marked(marked_calls.DEEPSEEK),
        "deepseek_v31": _marked(marked_calls.DEEPSEEK),
        "gemma4": _ToolFormat(lambda _: gemma4.Gemma4(), (gemma4.START,), True, _GEMMA),
        "glm45": _GLM,
        "glm47": _GLM,
        "granite": _tagged(tagged_lists.GRANITE),
        "hermes": _ToolFormat(lambda _: hermes.Hermes(), (hermes.START,), False, _hermes, "\n"),
        "jamba": _tagged(tagged_lists.JAMBA),
        "kimi_k2": _marked(marked_calls.KIMI_K2),
        "lfm2": _tagged(tagged_lists.LFM2, pythonic.PythonCall),
        "llama3_json": _ToolFormat(
            lambda _: llama3_json.Llama3Json(), forms=_llama3_json, between="; "
        ),
        "mistral": _ToolFormat(lambda _: mistral.Mistral(), (mistral.START,), True, _mistral),
        "none": _ToolFormat(lambda _: PlainText()),
        "olmo3": _tagged(tagged_lists.OLMO3, pythonic.PythonCall),
        "phi4_mini_json": _tagged(tagged_lists.PHI4_MINI),
        "pythonic": _ToolFormat(lambda _: pythonic.Pythonic(), forms=_pythonic),
        "qwen3_coder": _functions((qwen3_coder.START, qwen3_coder.END)),
        "seed_oss": _functions((qwen3_coder.SEED_START, qwen3_coder.SEED_END)),
    }
)
_THINKING: Mapping[str, ThinkingTags] = MappingProxyType(
    {
        "deepseek_r1": thinking.DEEPSEEK_R1,
        "deepseek_v3": thinking.QWEN3,
        "gemma4": thinking.GEMMA4,
        "glm45": thinking.QWEN3,
        "granite": thinking.GRANITE,
        "kimi_k2": thinking.QWEN3,
        "mistral": thinking.MISTRAL,
        "olmo3": thinking.QWEN3,
        "qwen3": thinking.QWEN3,
        "seed_oss": thinking.SEED_OSS,
    }
)
_SHOWN_REASONING = frozenset({"gemma4", "mistral"})
"""Reasoning parsers whose tags are special tokens."""
NONE, HARMONY_TOOLS, HARMONY_REASONING = "none", "openai", "gpt_oss"
TOOL_PARSERS = tuple(sorted({*_TOOL_FORMATS, HARMONY_TOOLS}))
REASONING_PARSERS = tuple(sorted({*_THINKING, HARMONY_REASONING, NONE}))


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers; a factory of parsers.  :func:`parser_named` returns it."""

    tool: str
    reasoning: str

    @cached_property
    def is_plain(self) -> bool:
        """Whether an answer without functions to call is content only."""
        return not (self._is_harmony or self.has_thinking_tags)

    @cached_property
    def shows_special_tokens(self) -> bool:
        if self._is_harmony or self.reasoning in _SHOWN_REASONING:
            return True
        return _TOOL_FORMATS[self.tool].is_special

    def parser(
        self, tools: Tools = (), *, prompt: str | None = None, forced: Mode | None = None
    ) -> ModeParser:
        """Return a new parser for one answer.

        :param tools: functions that the model may call; without any, calls are not parsed.
        :param prompt: rendered prompt or its end, where the template may open or close the
            reasoning.
        :param forced: mode of :func:`kvell.server.answers.forced.forced_tool_calls`, which
            replaces the tool parser.
        """
        if self._is_harmony:
            calls = self.tool != NONE and bool(tools)
            if forced is not None and self.reasoning == NONE:
                return ModeParser(forced)
            sorting = harmony.Sorting(self.reasoning != NONE, calls)
            return ModeParser(harmony.Harmony(sorting, forced))
        form = _TOOL_FORMATS[self.tool if tools else NONE]

        def make_then() -> Mode:
            return forced or form.make(tools)

        tags = _THINKING.get(self.reasoning)
        if tags is None or (prompt is not None and tags.closed_by(prompt)):
            return ModeParser(make_then())
        opened = tags.opened or (prompt is not None and tags.opened_by(prompt))
        starts = () if forced else form.starts
        return ModeParser(Thinking(tags, opened=opened, make_then=make_then, calls=starts))

    def call_starts(self) -> tuple[str, ...]:
        """Return the texts with which calls begin anywhere in an answer; a call ends reasoning."""
        return () if self._is_harmony else _TOOL_FORMATS[self.tool].starts

    def reasoning_context(self, prompt: str, content: str, reasoning: str) -> str:
        """Return the text that shows whether an answer continues inside its reasoning.

        It is the end of the prompt, or the last tag in the message that the answer continues.

        :param prompt: the rendered prompt or its end.
        :param reasoning: that message's reasoning, which may be unfinished if there is no text.
        """
        tags = _THINKING.get(self.reasoning)
        if tags is None:
            return prompt
        if reasoning and not content.strip() and not tags.closed_by(prompt):
            return tags.start
        return tags.last_tag(content) or prompt

    def reasoning_behind(self, prompt: str) -> Reasoning | None:
        """Return the reasoning that may precede a grammar; None if the grammar covers all text.

        :param prompt: the rendered prompt or its end.
        """
        if self.reasoning == HARMONY_REASONING:
            return harmony.REASONING
        tags = _THINKING.get(self.reasoning)
        if tags is None or tags.closed_by(prompt):
            return None
        opened = tags.opened or tags.opened_by(prompt)
        return Reasoning((tags.end,), "" if opened else tags.start)

    def calls_instead(self, tools: Sequence[Schema], *, parallel: bool = True) -> Calls | None:
        """Return the calls that an answer may be instead of its response format; None if none.

        GPT-OSS has none: it calls functions before its final message, where no grammar applies.
        """
        form = _TOOL_FORMATS.get(self.tool)
        if form is None or form.forms is None:
            return None
        calls = [
            call
            for tool in tools
            for call in form.forms(tool["function"]["name"], arguments_schema(tool))
        ]
        return Calls(tuple(dict.fromkeys(calls)), form.between, repeats=parallel) if calls else None

    @cached_property
    def has_thinking_tags(self) -> bool:
        return self.reasoning in _THINKING

    @property
    def _is_harmony(self) -> bool:
        return self.tool == HARMONY_TOOLS or self.reasoning == HARMONY_REASONING


def parser_named(tool: str, reasoning: str) -> AnswerFormat:
    """Return the format with these parsers.

    :raises ChangeSomething: if a name is unknown, or the parsers cannot be combined.
    """
    _known("--tool-call-parser", tool, TOOL_PARSERS)
    _known("--reasoning-parser", reasoning, REASONING_PARSERS)
    if tool == HARMONY_TOOLS and reasoning not in (HARMONY_REASONING, NONE):
        _refuse_pair("--reasoning-parser", reasoning, HARMONY_TOOLS, HARMONY_REASONING)
    if reasoning == HARMONY_REASONING and tool not in (HARMONY_TOOLS, NONE):
        _refuse_pair("--tool-call-parser", tool, HARMONY_REASONING, HARMONY_TOOLS)
    return AnswerFormat(tool, reasoning)


def check_parsers(tool: str | None, reasoning: str | None) -> None:
    """Check names of parsers before a model is loaded; None is the default of its template.

    :raises ChangeSomething: as :func:`parser_named` does.
    """
    parser_named(NONE if tool is None else tool, NONE if reasoning is None else reasoning)


def default_parsers(model_type: str, chat_template: str) -> tuple[str, str]:
    """Return a model's default tool and reasoning parser; ``none`` where no parser fits.

    :param chat_template: text of its template, or "".
    """
    if model_type == "gpt_oss" or "<|channel|>" in chat_template:
        return HARMONY_TOOLS, HARMONY_REASONING
    return _default_tool(model_type, chat_template), _default_reasoning(model_type, chat_template)


_TOOLS_BY_TEXT: tuple[tuple[str, str], ...] = (
    (marked_calls.KIMI_K2.calls_begin, "kimi_k2"),
    (marked_calls.DEEPSEEK.calls_begin, "deepseek_v3"),
    (qwen3_coder.SEED_START, "seed_oss"),
    (gemma4.START, "gemma4"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_calls>", "jamba"),
    ("<function_calls>", "olmo3"),
    (tagged_lists.LFM2[0][0], "lfm2"),
    ("<|/tool|>", "phi4_mini_json"),
    ("<|tool|>", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    (mistral.START, "mistral"),
    ("<|python_start|>", "pythonic"),
)
"""Texts of templates, and the parser of their calls; the first that fits."""
_TOOLS_BY_TYPE: tuple[tuple[str, str], ...] = (
    ("granite", "granite"),
    ("jamba", "jamba"),
    ("kimi", "kimi_k2"),
    ("deepseek_v3", "deepseek_v3"),
    ("llama4", "pythonic"),
)
"""The beginning of a model's type, and its parser, if its template does not show one."""
_REASONING_BY_TEXT: tuple[tuple[str, str], ...] = (
    (thinking.MISTRAL.start, "mistral"),
    (thinking.SEED_OSS.start, "seed_oss"),
    (thinking.GEMMA4.start, "gemma4"),
    (thinking.GRANITE.start, "granite"),
)


def _default_tool(model_type: str, template: str) -> str:
    if "tools" not in template:
        return NONE
    for text, parser in _TOOLS_BY_TEXT:
        if text in template:
            return parser
    if llama3_json.TAG in template:
        return "llama3_json"
    if model_type in ("llama", "mllama") and '"parameters": ' in template:
        return "llama3_json"
    for beginning, parser in _TOOLS_BY_TYPE:
        if model_type.startswith(beginning):
            return parser
    return NONE


def _default_reasoning(model_type: str, template: str) -> str:
    for text, parser in _REASONING_BY_TEXT:
        if text in template:
            return parser
    if "</think>" not in template:
        return NONE
    # With a switch, the answer may have no reasoning, so the model writes both tags.
    switched = "enable_thinking" in template or "<think>" not in template.rpartition("</think>")[2]
    if model_type.startswith("qwen3") or (switched and model_type != "deepseek_v3"):
        return "qwen3"
    return "deepseek_r1"


def _known(field: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise ChangeSomething(field, name[:100], "is not known", f"use one of {', '.join(names)}")


def _refuse_pair(field: str, name: str, other: str, fitting: str) -> None:
    raise ChangeSomething(
        field, name, f"cannot be combined with {other}", f"use {fitting} or {NONE}"
    )
