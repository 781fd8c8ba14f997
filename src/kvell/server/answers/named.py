"""Parsers by vLLM's names, and the default parsers for a model's chat template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvell.engine.protocol.schemas.references import Schema
from kvell.engine.protocol.structured_outputs import Calls, Reasoning
from kvell.errors import ChangeSomething
from kvell.server.answers.deltas import AnswerParser
from kvell.server.answers.formats import harmony, mistral, thinking
from kvell.server.answers.formats.hermes import Hermes
from kvell.server.answers.formats.llama3_json import TAG, Llama3Json
from kvell.server.answers.formats.pythonic import Pythonic
from kvell.server.answers.formats.qwen3_coder import Qwen3Coder
from kvell.server.answers.formats.thinking import Thinking, ThinkingTags
from kvell.server.answers.reading.modes import Mode, ModeParser, PlainText
from kvell.server.answers.written_calls import written_calls

Tools = Sequence[Mapping[str, Any]]

_TOOL_MODES: Mapping[str, Callable[[Tools], Mode]] = MappingProxyType(
    {
        "hermes": lambda _: Hermes(),
        "llama3_json": lambda _: Llama3Json(),
        "mistral": lambda _: mistral.Mistral(),
        "none": lambda _: PlainText(),
        "pythonic": lambda _: Pythonic(),
        "qwen3_coder": Qwen3Coder,
    }
)
_THINKING: Mapping[str, ThinkingTags] = MappingProxyType(
    {
        "deepseek_r1": thinking.DEEPSEEK_R1,
        "mistral": thinking.MISTRAL,
        "qwen3": thinking.QWEN3,
    }
)
NONE, HARMONY_TOOLS, HARMONY_REASONING = "none", "openai", "gpt_oss"
TOOL_PARSERS = tuple(sorted({*_TOOL_MODES, HARMONY_TOOLS}))
REASONING_PARSERS = tuple(sorted({*_THINKING, HARMONY_REASONING, NONE}))


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers; a factory of parsers.  :func:`parser_named` returns it."""

    tool: str
    reasoning: str

    @property
    def shows_special_tokens(self) -> bool:
        """Whether markers are special tokens, which the detokenizer must then keep."""
        return self._is_harmony or "mistral" in (self.tool, self.reasoning)

    def parser(
        self, tools: Tools = (), *, prompt: str | None = None, forced: Mode | None = None
    ) -> AnswerParser:
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
        then = forced or (_TOOL_MODES[self.tool](tools) if tools else PlainText())
        tags = _THINKING.get(self.reasoning)
        if tags is None or (prompt is not None and tags.closed_by(prompt)):
            return ModeParser(then)
        opened = tags.opened or (prompt is not None and tags.opened_by(prompt))
        return ModeParser(Thinking(tags, opened=opened, then=then))

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

        :param parallel: whether the answer may have several calls.
        """
        return written_calls(self.tool, tools, parallel=parallel)

    @property
    def has_thinking_tags(self) -> bool:
        """Whether reasoning is enclosed in two tags."""
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
    if tool is not None and reasoning is not None:
        parser_named(tool, reasoning)
    elif tool is not None:
        _known("--tool-call-parser", tool, TOOL_PARSERS)
    elif reasoning is not None:
        _known("--reasoning-parser", reasoning, REASONING_PARSERS)


def default_parsers(model_type: str, chat_template: str) -> tuple[str, str]:
    """Return a model's default tool and reasoning parser; ``none`` where no parser fits.

    :param model_type: ``model_type`` of its config.
    :param chat_template: text of its template, or "".
    """
    if model_type == "gpt_oss" or "<|channel|>" in chat_template:
        return HARMONY_TOOLS, HARMONY_REASONING
    return _default_tool(model_type, chat_template), _default_reasoning(model_type, chat_template)


def _default_tool(model_type: str, template: str) -> str:
    if "tools" not in template:
        return NONE
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if mistral.START in template:
        return "mistral"
    if "<|python_start|>" in template or "<|tool_call_start|>" in template:
        return "pythonic"
    if model_type.startswith("llama4"):
        return "pythonic"
    llama = model_type in ("llama", "mllama") and '"parameters": ' in template
    return "llama3_json" if llama or TAG in template else NONE


def _default_reasoning(model_type: str, template: str) -> str:
    if thinking.MISTRAL.start in template:
        return "mistral"
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
