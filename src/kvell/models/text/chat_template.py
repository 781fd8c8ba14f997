"""A model's chat template: its file, the format of its input, and templates that users give.

A template takes content as a text or as a list of parts. One that reads parts shows nothing of a
text, and raises no error. So it is probed with both, for each role; one that shows neither reads
parts if it has a loop over them, as in vLLM.

A template takes the arguments of function calls as objects or as text. Most templates write them
with ``tojson``, or iterate over them: these take objects, as in vLLM. Some (DeepSeek V3's) join
them to other text: these take the text that clients send.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import nodes

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import one_line, read_optional_json
from kvell.models.text.rendering.control_tokens import (
    NO_ADDED_TOKENS,
    AddedToken,
    ControlTokens,
    SpecialTokensInText,
    control_tokens,
)
from kvell.wire.decoding import read_bounded
from kvell.wire.json_text import read_json, write_json

if TYPE_CHECKING:
    from kvell.models.text.rendering.environment import CompiledTemplate

MOST_ARGUMENT_PARTS = 1 << 19
"""The most brackets, commas and colons in the texts of a conversation's arguments that are read.

Those in strings count too; arguments that fit a context of a million tokens have fewer.
"""
NAME = "kvellprobe3c9d"
_ARGUMENTS = {NAME: "x"}


Message = Mapping[str, object]


Render = Callable[[Sequence[Message]], str]


def with_arguments(messages: Sequence[Message], *, as_text: bool) -> list[Message]:
    """Return the messages with each call's arguments in the template's form.

    Text that is not JSON stays text: an answer that was truncated in the middle of a call stays a
    part of its conversation.  So does text beyond ``MOST_ARGUMENT_PARTS``.
    """
    return changed_arguments(messages, _text if as_text else ArgumentReader().read)


def takes_argument_text(render: Render, parts_for: frozenset[str]) -> bool:
    """Return whether a template shows arguments right only if they are text.

    :param render: the template; it may raise anything.
    :param parts_for: roles whose content it reads as a list of parts.
    :raises ChangeSomething: if the template works without end.
    """
    as_objects = _shown(render, parts_for, _ARGUMENTS)
    if NAME in as_objects and f"'{NAME}'" not in as_objects:  # not as Python writes a dict
        return False
    return f'"{NAME}"' in _shown(render, parts_for, write_json(_ARGUMENTS))


def _shown(render: Render, parts_for: frozenset[str], arguments: object) -> str:
    call = {"name": "probe", "arguments": arguments}
    calls = [{"id": "call00001", "type": "function", "function": call}]
    conversation: list[Message] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    try:
        return render(with_content(conversation, parts_for))
    except ChangeSomething:
        raise
    except Exception:  # a template may do anything but show the arguments
        return ""


class ArgumentReader:
    """The reader of a conversation's arguments."""

    def __init__(self) -> None:
        self._left = MOST_ARGUMENT_PARTS

    def read(self, arguments: object) -> object:
        """Return the object of a call's arguments; what is not JSON or too large stays a text."""
        if arguments is None or arguments == "":
            return {}
        if not isinstance(arguments, str):
            return arguments
        parts = sum(map(arguments.count, "[{,:"))
        if parts > self._left:
            return arguments
        self._left -= parts
        try:
            value = read_json(arguments)
            if "\\u" in arguments:  # it may be half a character, which cannot be encoded
                json.dumps(value, ensure_ascii=False).encode()
        except ValueError:
            return arguments
        return {} if value is None else value


def _text(arguments: object) -> object:
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else write_json(arguments)


def changed_arguments(
    messages: Sequence[Message], change: Callable[[object], object]
) -> list[Message]:
    """Return the messages with each call's arguments changed."""
    return [
        {**message, "tool_calls": [_call(call, change) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _call(call: object, change: Callable[[object], object]) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}


NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
"""No further variables of a chat template."""
ContentFormat = Literal["auto", "string", "openai"]
"""The input of a template: a text, parts as in OpenAI's API, or the format that it reads."""


ROLES = frozenset({"system", "user", "assistant", "tool"})
USER = "user"
BETWEEN_PARTS = "\n"
"""The text between the text parts of a message for a template that reads texts, as in vLLM."""
PROBE = "kvellprobe7f3a"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": {}}}


def with_content(messages: Sequence[Message], parts_for: frozenset[str]) -> list[Message]:
    """Return the messages with each text in the template's format.

    Content with images stays a list of parts: a template of such a model defines their places.

    :param parts_for: roles whose content is a list of parts; other roles than :data:`ROLES` are as
        the user.
    :raises KeyError: if a part of type ``text`` has no ``text``.
    """
    return [_with_content(message, parts_for) for message in messages]


def roles_with_parts(render: Render, *, iterates: bool) -> frozenset[str]:
    """Return the roles whose content a template reads as a list of parts.

    :param render: the template; it may raise anything.
    :param iterates: whether it has a loop over the content of a message.
    :raises ChangeSomething: if the template works without end.
    """
    by_user = _reads_parts(render, lambda content: [_said(USER, content)])
    if by_user is None:
        by_user = iterates
    question = _said(USER, _content("hello", is_parts=by_user))
    called = {**_said("assistant", _content("", is_parts=by_user)), "tool_calls": [_CALL]}
    answered = {"name": "probe", "tool_call_id": _CALL["id"]}
    reads = {
        USER: by_user,
        "system": _reads_parts(render, lambda content: [_said("system", content), question]),
        "assistant": _reads_parts(
            render, lambda content: [question, _said("assistant", content), question]
        ),
        "tool": _reads_parts(
            render, lambda content: [question, called, {**_said("tool", content), **answered}]
        ),
    }
    return frozenset(role for role, parts in reads.items() if (by_user if parts is None else parts))


def _with_content(message: Message, parts_for: frozenset[str]) -> Message:
    content, role = message.get("content"), message.get("role")
    is_parts = (role if role in ROLES else USER) in parts_for
    if isinstance(content, str) and is_parts:
        return {**message, "content": _content(content, is_parts=True)}
    if isinstance(content, list) and not is_parts and _is_text(content):
        return {**message, "content": BETWEEN_PARTS.join(str(part["text"]) for part in content)}
    return message


def _is_text(parts: Sequence[object]) -> bool:
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)


def _content(text: str, *, is_parts: bool) -> str | list[dict[str, str]]:
    return [{"type": "text", "text": text}] if is_parts else text


def _said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def _reads_parts(render: Render, conversation: Callable[[object], list[Message]]) -> bool | None:
    """Return whether a text is shown only if it is a part; None if it is not shown either way."""
    for is_parts in (False, True):
        try:
            text = render(conversation(_content(PROBE, is_parts=is_parts)))
        except ChangeSomething:
            raise
        except Exception:  # a template may do anything but show the text
            continue
        if PROBE in text.lower():
            return is_parts
    return None


DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of the templates that are used, if a model has several: without tools and with them."""
MAX_TEMPLATE_BYTES = 4 << 20
TEMPLATE_FILE, PROCESSOR_FILE = "chat_template.jinja", "chat_template.json"
JINJA_CHARS = frozenset("{}\n")
"""A text with one of these is a template; one without can only be the name of a file."""


@dataclass(frozen=True)
class ChosenTemplate:
    """A user's choice of a model's chat template.

    :param text: the template; None for the model's own.
    :param name: its file, for messages.
    :param content_format: the form of content; ``auto`` probes the template.
    :param special_tokens_in_text: whether special tokens that a message names are such tokens, or
        stay text.
    """

    text: str | None = None
    name: str = ""
    content_format: ContentFormat = "auto"
    special_tokens_in_text: SpecialTokensInText = "allow"


THE_MODELS_OWN = ChosenTemplate()


def chosen_template(
    template: str | None,
    content_format: ContentFormat = "auto",
    special_tokens_in_text: SpecialTokensInText = "allow",
) -> ChosenTemplate:
    """Read and check a template that a user gives.

    :param template: a file, or the text itself; None for the model's own.
    :raises ChangeSomething: if there is no such file, or the template does not compile.
    """
    if template is None:
        return ChosenTemplate(None, "", content_format, special_tokens_in_text)
    text, name = _read(template)
    compiled_template(text, "chat_template", name)
    return ChosenTemplate(text, name, content_format, special_tokens_in_text)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer or processor, or several by name.

    :param compiled: by name; the only one is ``default``.
    :param special_tokens: variables of every conversation.
    :param parts_for: roles whose content it reads as a list of parts.
    :param takes_tools: whether it shows tools at all.
    :param takes_argument_text: whether it takes arguments of calls as text, not as objects.
    :param control_tokens: the tokens that stay text in what clients send; None if they do not.
    """

    compiled: "Mapping[str, CompiledTemplate]"
    special_tokens: Mapping[str, object]
    parts_for: frozenset[str]
    takes_tools: bool
    takes_argument_text: bool
    control_tokens: ControlTokens | None = None

    @property
    def text(self) -> str:
        """All texts, one after the other, to search in."""
        return "\n".join(template.text for template in self.compiled.values())

    @property
    def usual(self) -> str:
        """The template for all conversations, or else the first."""
        return _usual(self.compiled).text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        fields: Mapping[str, object],
        *,
        opens_answer: bool,
        continues_last: bool = False,
    ) -> str:
        """Return the text of a conversation.

        :param fields: further variables, which replace special tokens of the same names.
        :raises KeyError: if there is no template for all conversations.
        :raises ChangeSomething: if the template needs too much work.
        :raises Exception: of any type, from the template.
        """
        template = self.compiled[FOR_TOOLS if tools and FOR_TOOLS in self.compiled else DEFAULT]
        messages = with_content(messages, self.parts_for)
        if any("tool_calls" in message for message in messages):
            messages = with_arguments(messages, as_text=self.takes_argument_text)
        if self.control_tokens is not None:
            messages = self.control_tokens.mark_messages(messages)
            tools = [self.control_tokens.finder.mark_mapping(tool) for tool in tools or ()]
            fields = self.control_tokens.finder.mark_mapping(fields) if fields else fields
        try:
            return template.render(
                messages,
                list(tools) if tools else None,
                {**self.special_tokens, **fields},
                opens_answer=opens_answer,
                continues_last=continues_last,
            )
        except ChangeSomething as error:  # clients learn no file of the server
            raise ChangeSomething("chat_template", "…", error.problem, error.remedy) from error


def read_template(
    own_template: object,
    chosen: ChosenTemplate,
    path: Path | None,
    special_tokens: Mapping[str, object],
    added_tokens: Mapping[int, AddedToken] = NO_ADDED_TOKENS,
) -> ChatTemplate | None:
    """Return the template to use; None if there is none.

    :param own_template: transformers' result for the model's directory: one, or several by name.
    :param path: the directory, for one that transformers leaves to processors; None if unknown.
    :param special_tokens: the tokenizer's special tokens by their names.
    :param added_tokens: the tokens that the tokenizer finds in a text first, by id.
    :raises ChangeSomething: if a template does not compile, naming its file and line, or works
        without end.
    """
    field, name = ("chat_template", chosen.name) if chosen.text is not None else ("model", "")
    if chosen.text is not None:
        own_template = chosen.text
    elif not own_template and path is not None:
        own_template = read_optional_json(path / PROCESSOR_FILE).get("chat_template")
        name = str(path / PROCESSOR_FILE)
    if not own_template:
        return None
    several = own_template if isinstance(own_template, Mapping) else {DEFAULT: own_template}
    texts = {str(key): text for key, text in several.items() if isinstance(text, str)}
    if len(texts) < len(several):
        where = name or _place(path, DEFAULT, several=False)
        raise ChangeSomething(field, where, "has a chat template that is not text", "repair it")
    compiled = {
        key: compiled_template(text, field, name or _place(path, key, several=len(texts) > 1))
        for key, text in texts.items()
    }
    usual = _usual(compiled)
    takes_tools = FOR_TOOLS in texts or _reads(usual.tree, "tools")
    formats = {"string": frozenset[str](), "openai": ROLES}
    parts_for = formats.get(chosen.content_format)
    if parts_for is None:
        iterates = _iterates_over_content(usual.tree)
        parts_for = roles_with_parts(_rendering(usual, special_tokens), iterates=iterates)
    calling = _rendering(compiled.get(FOR_TOOLS, usual), special_tokens)
    takes_text = takes_argument_text(calling, parts_for)
    made = ChatTemplate(compiled, special_tokens, parts_for, takes_tools, takes_text)
    if chosen.special_tokens_in_text == "allow":
        return made
    return replace(made, control_tokens=control_tokens(added_tokens.values(), made.text))


def _usual(compiled: "Mapping[str, CompiledTemplate]") -> "CompiledTemplate":
    return compiled.get(DEFAULT) or next(iter(compiled.values()))


def _rendering(template: "CompiledTemplate", special_tokens: Mapping[str, object]) -> Render:
    return lambda messages: template.render(messages, None, special_tokens, opens_answer=True)


def compiled_template(text: str, field: str, name: str) -> "CompiledTemplate":
    """Compile a template.

    :param field: the field of errors.
    :param name: the file or source of the template, for errors.
    :raises ChangeSomething: if it does not compile, naming the line.
    """
    # Imported here: an instance that serves a front handles no text.
    from kvell.models.text.rendering.environment import CompiledTemplate

    return CompiledTemplate(text, field, name)


def _reads(tree: nodes.Template, variable: str) -> bool:
    return any(node.name == variable and node.ctx == "load" for node in tree.find_all(nodes.Name))


def _read(template: str) -> tuple[str, str]:
    file = Path(template).expanduser()
    try:
        if JINJA_CHARS.isdisjoint(template) or file.is_file():
            return read_bounded(file, MAX_TEMPLATE_BYTES).decode(), template
    except (OSError, ValueError) as error:
        if JINJA_CHARS.isdisjoint(template):
            problem = f"cannot be read ({one_line(error)})"
            remedy = "give a file, or a template's text"
            raise ChangeSomething("chat_template", template, problem, remedy) from error
    return template, "the given text"


def _place(path: Path | None, name: str, *, several: bool) -> str:
    if path is None:
        return "the model's chat template"
    for file in (path / TEMPLATE_FILE, path / "additional_chat_templates" / f"{name}.jinja"):
        if file.is_file() and (name == DEFAULT) == (file.name == TEMPLATE_FILE):
            return str(file)
    return f"{path / 'tokenizer_config.json'}" + (f", chat_template {name!r}" if several else "")


def _iterates_over_content(tree: nodes.Template) -> bool:
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    return any(_is_content(node.iter, frozenset(names)) for node in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
