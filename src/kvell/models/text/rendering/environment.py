"""jinja's sandbox as transformers sets it up, with a budget for the work of each rendering."""

import copy
from collections.abc import Callable, Mapping, Sequence

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, _PassArg, pass_context
from typing_extensions import override

from kvell.errors import ChangeSomething
from kvell.models.text.rendering.budget import (
    CALL_UNITS,
    CHAR_UNITS,
    MESSAGE_UNITS,
    MOST_CHAR_UNITS,
    MOST_MESSAGE_UNITS,
    MOST_UNITS,
    MOST_WIDTH,
    Datum,
    Keywords,
    RenderBudget,
    WorkExceededError,
)
from kvell.models.text.rendering.calls import INSTANT_FILTERS, check_filter, check_method
from kvell.models.text.rendering.generator import CountingGenerator

READING_TESTS = frozenset(
    ("in divisibleby eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >=").split()
)
"""Tests whose work grows with their operands."""
DICT_ATTRIBUTES = frozenset(dir(dict))
ATTRIBUTES: Mapping[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"},
    LoopContext: frozenset(name for name in dir(LoopContext) if name[0] != "_"),
}
"""Attributes that the sandbox allows as they are."""
OWN_CONTAINERS = ("batch", "slice", "groupby")
"""Filters that make a container of each of their items."""


class _Namespace(Namespace):
    """A namespace whose text does not show its values, which may contain it."""

    @override
    def __repr__(self) -> str:
        return "<Namespace>"


class BudgetedContext(Context):
    """The variables of a rendering, and its budget."""

    budget: RenderBudget

    @override
    def derived(self, locals: dict[str, Datum] | None = None) -> "BudgetedContext":
        context: BudgetedContext = super().derived(locals)  # type: ignore[assignment]
        context.budget = self.budget
        return context


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates.

    Nothing is computed while a template is compiled, since that has no budget.
    """

    code_generator_class = CountingGenerator
    context_class = BudgetedContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, source: Datum) -> None:
        """Take over extensions, filters and functions.

        :param source: the environment that transformers makes.
        """
        super().__init__(
            trim_blocks=source.trim_blocks,
            lstrip_blocks=source.lstrip_blocks,
            extensions=[type(extension) for extension in source.extensions.values()],
            optimized=False,
            cache_size=0,
        )
        self.globals.update(source.globals, namespace=_Namespace)
        self.globals["strftime_now"] = _short_format(source.globals["strftime_now"])
        del self.globals["lipsum"]  # text without end
        self.filters = {
            name: filter_ if name in INSTANT_FILTERS else _budgeted(name, filter_)
            for name, filter_ in source.filters.items()
        }
        self.tests = {
            name: _reading(test) if name in READING_TESTS else test
            for name, test in source.tests.items()
        }

    @override
    def getattr(self, obj: Datum, attribute: str) -> Datum:
        """Return what the sandbox returns, without its checks where they allow everything."""
        kind = type(obj)
        if kind is dict and attribute not in DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if attribute in ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    @override
    def call_binop(self, context: Datum, operator: str, left: Datum, right: Datum) -> Datum:
        return context.budget.operate(operator, left, right)

    @override
    def call(__self, __context: Context, __obj: Datum, *args: Datum, **kwargs: Datum) -> Datum:  # noqa: N805
        budget = __context.budget  # type: ignore[attr-defined]
        budget.charge(CALL_UNITS)
        owner = getattr(__obj, "__self__", None)
        if owner is not None:
            args = check_method(budget, owner, __obj.__name__, args, kwargs)
        elif hasattr(__obj, "__wrapped__"):  # a text's format or format_map, wrapped by the sandbox
            return budget.count_made(_formatted(__self, budget, __obj, args, kwargs))
        elif type(__obj) is not Macro or __obj.catch_varargs or __obj.catch_kwargs:
            budget.nest(args)
            budget.nest({name: value for name, value in kwargs.items() if name[0] != "_"})
        return budget.count_made(super().call(__context, __obj, *args, **kwargs))


class _Formatter(SandboxedFormatter):
    """The sandbox's formatter, with bounds on widths and on the text of each field."""

    def __init__(self, env: BudgetedEnvironment, budget: RenderBudget) -> None:
        super().__init__(env)
        self._budget = budget

    @override
    def format_field(self, value: Datum, format_spec: str) -> str:
        self._budget.require_widths(format_spec)
        self._budget.show(value)
        text: str = super().format_field(value, format_spec)
        return text

    @override
    def convert_field(self, value: Datum, conversion: Datum) -> Datum:
        self._budget.show(value)
        return super().convert_field(value, conversion)


def _formatted(
    environment: BudgetedEnvironment,
    budget: RenderBudget,
    method: Datum,
    args: Sequence[Datum],
    kwargs: Mapping[str, Datum],
) -> str:
    text: str = method.__wrapped__.__self__
    values = {name: value for name, value in kwargs.items() if not name.startswith("_loop_vars")}
    values.pop("_block_vars", None)
    if method.__name__ == "format_map":
        [values] = args
        args = ()
    budget.count_made(text)
    return _Formatter(environment, budget).vformat(text, args, values)


def _short_format(strftime: Callable[[str], str]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002 - transformers' name
        if len(format) > MOST_WIDTH:
            raise WorkExceededError
        return strftime(format)

    return strftime_now


def _budgeted(name: str, function: Callable[..., Datum]) -> Callable[..., Datum]:
    passed = _PassArg.from_obj(function)
    is_new = name in OWN_CONTAINERS

    @pass_context
    def filter_within_budget(
        context: BudgetedContext, value: Datum, *args: Datum, **kwargs: Datum
    ) -> Datum:
        budget = context.budget
        value = check_filter(context, name, value, args, kwargs)
        if passed is None:
            result = function(value, *args, **kwargs)
        else:
            first = {
                _PassArg.context: context,
                _PassArg.eval_context: context.eval_ctx,
                _PassArg.environment: context.environment,
            }[passed]
            result = function(first, value, *args, **kwargs)
        if hasattr(result, "__next__"):
            return budget.count_items(result, is_new=is_new)
        if is_new:
            for item in result:
                budget.nest(item)
        return budget.count_made(result)

    return filter_within_budget


def _reading(test: Callable[..., Datum]) -> Callable[..., Datum]:
    @pass_context
    def reading(context: BudgetedContext, *operands: Datum) -> Datum:
        for operand in operands:
            context.budget.take_read(operand)
        return test(*operands)

    return reading


def render(template: Template, variables: Mapping[str, Datum], budget: RenderBudget) -> str:
    """Return the text of a template.

    :raises WorkExceededError: if it needs more than the budget.
    """
    context = template.new_context(dict(variables))
    context.budget = budget  # type: ignore[attr-defined]
    pieces = list(template.root_render_func(context))
    budget.charge(0)  # constants are counted without a check
    return "".join(pieces)


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
