"""Chat templates: no text that a client sends is lost, whichever form of content they read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.models.text.chat_template import ROLES, ChatTemplate, ChosenTemplate, chosen_template
from kvell.models.text.tokenizer import Tokenizer
from tests.models.cases import some_fast

LOOP = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
LOOP += "{% endfor %}"


def of_messages(body: str) -> str:
    return "{% for message in messages %}<{{ message.role }}>" + body + "{% endfor %}"


PLAIN = of_messages("{{ message['content'] }}")
STRIPPED = of_messages("{{ message.content.split('</think>')[-1] | trim | upper }}")
PARTS = of_messages(LOOP)
FIRST_ONLY = of_messages("{{ message.content[0].text }}")
MACRO = "{% macro show(parts) %}{% for one in parts %}{{ one.text }}{% endfor %}{% endmacro %}"
MACRO += of_messages("{{ show(message.content) }}")
EITHER = of_messages(
    "{% if message.content is string %}{{ message.content }}{% else %}" + LOOP + "{% endif %}"
)
SYSTEM_TEXT = of_messages(
    "{% if message.role == 'system' %}{{ message.content | trim }}{% else %}" + LOOP + "{% endif %}"
)
"""As Llama 3.2 Vision's: a list would be shown as Python writes it."""
ALTERNATING = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ message.role }}>" + LOOP + "{% endfor %}"
)
NEEDS_DOCUMENTS = (
    "{% if not documents %}{{ raise_exception('documents are needed') }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{% set content = message['content'] %}"
    "{% for part in content | list %}{{ part.text }}{% endfor %}{% endfor %}"
)
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TWO_PARTS = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]


def template_of(tokenizer: Tokenizer, text: str, **more: Any) -> ChatTemplate:
    found = tokenizer.choose_template(chosen_template(text, **more))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "parts_for"),
    [
        (PLAIN, set()),
        (STRIPPED, set()),
        (EITHER, set()),
        (PARTS, ROLES),
        (FIRST_ONLY, ROLES),
        (MACRO, ROLES),
        (SYSTEM_TEXT, ROLES - {"system"}),
        (ALTERNATING, ROLES),
        (NEEDS_DOCUMENTS, ROLES),
    ],
)
def test_what_a_template_reads_is_found_out(
    smollm2_tokenizer: Tokenizer, text: str, parts_for: set[str]
) -> None:
    assert template_of(smollm2_tokenizer, text).parts_for == parts_for


@pytest.mark.parametrize("text", [PLAIN, EITHER, PARTS, MACRO, SYSTEM_TEXT])
@pytest.mark.parametrize("content", ["Hi you", TWO_PARTS])
def test_every_text_arrives(smollm2_tokenizer: Tokenizer, text: str, content: object) -> None:
    roles = ("system", "user", "assistant", "user", "tool")
    messages = [{"role": role, "content": content} for role in roles]
    chosen = template_of(smollm2_tokenizer, text)
    shown = smollm2_tokenizer.rendered_chat(messages, template=chosen, opens_answer=False)
    joined = {
        role: "Hi you" if content == "Hi you" or role in chosen.parts_for else "Hi \nyou"
        for role in roles
    }
    assert shown == "".join(f"<{role}>{joined[role]}" for role in roles)


CALLS = "{% for message in messages %}{% for call in message.tool_calls or [] %}"
SENT = '{"city":  "Bern"}'


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("{{ call.function.arguments | tojson }}", '{"city": "Bern"}'),
        (
            "{% for k, v in call.function.arguments.items() %}<{{ k }}={{ v }}>{% endfor %}",
            "<city=Bern>",
        ),
        ("{{ '\\n' + call['function']['arguments'] + '\\n' }}", f"\n{SENT}\n"),
        ("{{ call.function.arguments }}", SENT),
        (
            "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}",
            '{"city": "Bern"}',
        ),
        (
            "{% set a = call.function.arguments %}{% if a is string %}{{ a }}"
            "{% else %}{{ raise_exception('text is needed') }}{% endif %}",
            SENT,
        ),
    ],
)
def test_arguments_of_calls_have_the_form_that_a_template_takes(
    smollm2_tokenizer: Tokenizer, body: str, shown: str
) -> None:
    chosen = template_of(smollm2_tokenizer, CALLS + body + "{% endfor %}{% endfor %}")
    function = {"name": "look", "arguments": SENT}
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    assert smollm2_tokenizer.rendered_chat(messages, template=chosen) == shown


def test_a_message_that_says_nothing_has_a_part_too(smollm2_tokenizer: Tokenizer) -> None:
    chosen = template_of(smollm2_tokenizer, FIRST_ONLY)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    assert smollm2_tokenizer.rendered_chat(messages, template=chosen) == "<user>Hi<assistant>"


@pytest.mark.parametrize(("content_format", "shown"), [("string", "<user>"), ("openai", "<user>x")])
def test_a_user_may_say_what_it_reads(
    smollm2_tokenizer: Tokenizer, content_format: str, shown: str
) -> None:
    chosen = template_of(smollm2_tokenizer, PARTS, content_format=content_format)
    messages = [{"role": "user", "content": "x"}]
    assert smollm2_tokenizer.rendered_chat(messages, template=chosen) == shown


@pytest.mark.parametrize("raises", ["1 // 0", "[1][5]", "'a'.encode('no such')", "{}['a']['b']"])
def test_whatever_a_template_raises_is_said_of_the_messages(
    smollm2_tokenizer: Tokenizer, raises: str
) -> None:
    text = "{% for m in messages %}{% if m.content == 'x' %}{{ (" + raises + ").y.z }}{% endif %}"
    chosen = template_of(smollm2_tokenizer, text + "{% endfor %}")
    with pytest.raises(ChangeSomething, match="messages=…: the model's chat template refuses"):
        smollm2_tokenizer.rendered_chat([{"role": "user", "content": "x"}], template=chosen)


def test_roles_of_ones_own_are_as_the_user(smollm2_tokenizer: Tokenizer) -> None:
    chosen = template_of(smollm2_tokenizer, PARTS)
    messages = [{"role": "critic", "content": "x"}]
    assert smollm2_tokenizer.rendered_chat(messages, template=chosen) == "<critic>x"


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        (PLAIN, False),
        (PLAIN + "{{ message.tools }}", False),
        (PLAIN + "{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}" + PLAIN, True),
    ],
)
def test_whether_a_template_shows_tools(
    smollm2_tokenizer: Tokenizer, text: str, takes: bool
) -> None:
    assert template_of(smollm2_tokenizer, text).takes_tools == takes


@pytest.fixture
def directory(smollm2_path: Path, tmp_path: Path) -> Path:
    """The packaged model's tokenizer without a chat template."""
    shutil.copy(smollm2_path / "tokenizer.json", tmp_path)
    config = json.loads((smollm2_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def add_to_config(directory: Path, template: object) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def named_in_config(directory: Path) -> None:
    add_to_config(
        directory,
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}],
    )


def named_in_files(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")


@pytest.mark.parametrize("write", [named_in_config, named_in_files])
def test_of_several_templates_one_is_for_tools(directory: Path, write: Any) -> None:
    write(directory)
    tokenizer = Tokenizer.load(directory)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.rendered_chat(messages) == "plain"
    assert tokenizer.rendered_chat(messages, [TOOL]) == "with tools"
    assert tokenizer.template is not None and tokenizer.template.takes_tools


def in_config(directory: Path, text: str) -> str:
    add_to_config(directory, text)
    return "tokenizer_config.json"


def in_jinja(directory: Path, text: str) -> str:
    (directory / "chat_template.jinja").write_text(text)
    return "chat_template.jinja"


def in_processor_json(directory: Path, text: str) -> str:
    """Where older models with images have it, which transformers leaves to their processor."""
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    return "chat_template.json"


def among_several(directory: Path, text: str) -> str:
    (directory / "chat_template.jinja").write_text("plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text(text)
    return "rag.jinja"


@pytest.mark.parametrize("write", [in_config, in_jinja, in_processor_json])
def test_a_template_is_found_wherever_models_have_it(directory: Path, write: Any) -> None:
    write(directory, PARTS)
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.load(directory).rendered_chat(messages) == "<user>x"


@pytest.mark.parametrize(
    "write",
    some_fast([in_config, in_jinja, in_processor_json, among_several], [in_jinja, among_several]),
)
def test_a_template_that_does_not_compile_is_refused_by_file_and_line(
    directory: Path, write: Any
) -> None:
    file = write(directory, "{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    with pytest.raises(ChangeSomething, match="line 2 of the template does not compile") as refused:
        Tokenizer.load(directory)
    assert refused.value.field == "model" and file in str(refused.value.value)


def test_a_given_template_goes_before_the_models_own(directory: Path) -> None:
    in_jinja(directory, "{{ broken")
    loaded = Tokenizer.load(directory, ChosenTemplate(PARTS, "given"))
    assert loaded.rendered_chat([{"role": "user", "content": "x"}]) == "<user>x"


def test_a_given_template_may_be_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(PARTS)
    assert chosen_template(str(file)) == ChosenTemplate(PARTS, str(file))
    assert chosen_template(PLAIN).text == PLAIN
    assert chosen_template(None, "openai") == ChosenTemplate(content_format="openai")


def test_a_given_template_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething, match=r"chat_template=gone\.jinja: cannot be read"):
        chosen_template("gone.jinja")
    with pytest.raises(ChangeSomething, match="line 1 of the template does not compile"):
        chosen_template("{{ x")
    file = tmp_path / "latin.jinja"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ChangeSomething, match="cannot be read"):
        chosen_template(str(file))
