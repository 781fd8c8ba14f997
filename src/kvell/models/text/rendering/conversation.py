"""A compiled chat template, and the text of a conversation by it."""

import copy
from collections.abc import Sequence

from jinja2 import Template, TemplateError, nodes

from kvell.errors import ChangeSomething
from kvell.models.text.rendering.budget import (
    CHAR_UNITS,
    MESSAGE_UNITS,
    MOST_CHAR_UNITS,
    MOST_MESSAGE_UNITS,
    MOST_UNITS,
    Datum,
    Keywords,
    RenderBudget,
    WorkExceededError,
)
from kvell.models.text.rendering.environment import BudgetedEnvironment, render

CONTENT = "content"
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that the answer continues, as in transformers."""
MAX_TEMPLATE_CHARS = 1 << 20


class CompiledTemplate:
    """A chat template, compiled as transformers does.

    :param text: the template.
    :param field: the field of errors: ``chat_template`` or ``model``.
    :param name: the file or source of the template, for errors.
    :raises ChangeSomething: if it does not compile, naming the line.
    """

    def __init__(self, text: str, field: str, name: str) -> None:
        self.text, self._field, self._name = text, field, name
        # Imported here: an instance that serves a front handles no text.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        if len(text) > MAX_TEMPLATE_CHARS:
            raise self._wrong(f"has more than {MAX_TEMPLATE_CHARS} characters")
        try:
            environment = BudgetedEnvironment(_compile_jinja_template("").environment)
            self.tree: nodes.Template = environment.parse(text)
            self._template: Template = environment.from_string(text)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f"line {line} of the template" if line else "the template"
            raise self._wrong(f"{place} does not compile ({error.message})") from error
        except (SyntaxError, RecursionError, MemoryError, ValueError, TypeError) as error:
            # Python's own compiler bounds the depth of blocks and expressions.
            problem = f"the template does not compile ({type(error).__name__})"
            raise self._wrong(problem) from error

    def render(
        self,
        messages: Sequence[Keywords],
        tools: Sequence[Keywords] | None,
        variables: Keywords,
        *,
        opens_answer: bool,
        continues_last: bool = False,
    ) -> str:
        """Return the text of a conversation, as transformers renders it.

        :param variables: special tokens, and further variables of the request.
        :raises ChangeSomething: if the template needs too much work.
        :raises Exception: of any type, from the template.
        """
        if not messages:
            raise ValueError("Provide at least one message.")
        if continues_last and opens_answer:
            raise ValueError("continue_final_message and an opened answer exclude each other")
        marked, last = _marked(messages) if continues_last else (messages, "")
        own = {
            "messages": marked,
            "tools": tools,
            "documents": variables.get("documents"),
            "add_generation_prompt": opens_answer,
        }
        try:
            text = render(self._template, {**variables, **own}, _budget(messages))
        except WorkExceededError as error:
            count = f"{len(messages)} messages" if len(messages) > 1 else "one message"
            problem = f"needs too many operations, or too much memory, for {count}"
            raise self._wrong(problem) from error
        return _until_tag(text, last) if continues_last else text

    def _wrong(self, problem: str) -> ChangeSomething:
        remedy = "repair it, or give another with --chat-template"
        return ChangeSomething(self._field, self._name, problem, remedy)


def _budget(messages: Sequence[Keywords]) -> RenderBudget:
    """Return the budget for a conversation: a fixed part, and one for messages and characters."""
    chars = 0
    for message in messages:
        content = message.get(CONTENT)
        if isinstance(content, str):
            chars += len(content)
        elif isinstance(content, list):
            chars += sum(len(part.get("text") or "") for part in content if isinstance(part, dict))
    return RenderBudget(
        MOST_UNITS
        + min(MESSAGE_UNITS * len(messages), MOST_MESSAGE_UNITS)
        + min(CHAR_UNITS * chars, MOST_CHAR_UNITS)
    )


def _marked(messages: Sequence[Keywords]) -> tuple[list[dict[str, Datum]], str]:
    """Return the messages with a mark after the last text, and that text.

    :raises ValueError: if the last message has no text.
    """
    changed = [dict(message) for message in messages]
    content = changed[-1].get(CONTENT)
    if isinstance(content, str):
        changed[-1][CONTENT] = content + TAG
        return changed, content
    parts: list[Datum] = copy.copy(content) if isinstance(content, list) else []
    for index in range(len(parts) - 1, -1, -1):
        if "text" in parts[index]:
            text: str = parts[index]["text"]
            parts[index] = {**parts[index], "text": text + TAG}
            changed[-1][CONTENT] = parts
            return changed, text
    raise ValueError("continue_final_message is set, and the last message has no text to continue")


def _until_tag(text: str, last: str) -> str:
    """Return the text before the mark.

    :raises ValueError: if the template left the last message or its mark out.
    """
    mark = TAG.strip()
    if last.strip() not in text or mark not in text:
        raise ValueError("continue_final_message is set, and the template changes the last message")
    end = text.rindex(mark)
    # A template that trims the message trims the mark's space, so the message's own too.
    return text[:end] if text[end : end + len(TAG)] == TAG else text[:end].rstrip()
