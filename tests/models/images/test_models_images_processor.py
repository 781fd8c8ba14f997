"""A model's processor: where tools stand beside images, and which conversations it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.models.images.processor import PictureProcessor
from kvell.models.text.tokenizer import Tokenizer
from tests.llm.pictures import IMAGE_TOKEN, TEMPLATE, picture, save_processor
from tests.models.pictures import CROSS, picture_module

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED: Any = [
    {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "image"}]},
]
CALLED: Any = [
    *ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 7}}}
        ],
    },
    {"role": "tool", "content": "a cat", "tool_call_id": "c1", "name": "look"},
]
WITH_CALLS = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<|image|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}assistant: "
)
DEAF = TEMPLATE.replace("{% if tools %}{{ tools | tojson }}\n{% endif %}", "")
BEGIN = "w1"
"""The token that begins every text of this tokenizer."""
STRICT = "{{ raise_exception('no system message beside images') }}"


def processor(found: Path, template: str) -> PictureProcessor:
    save_processor(found, picture_module(CROSS).config)
    [file] = found.glob("chat_template*")
    file.write_text(template)
    made = PictureProcessor.of(found)
    assert made is not None
    return made


def text_of(
    found: Path, processor: PictureProcessor, messages: Any, tools: Any, **more: Any
) -> str:
    ids, tensors = processor.encode(messages, [picture(9)], tools, more, opens_answer=True)
    assert "pixel_values" in tensors
    return Tokenizer.load(found).decode(ids, skip_special_tokens=False)


def test_tools_and_calls_are_rendered_beside_images(tmp_path: Path) -> None:
    made = processor(tmp_path, WITH_CALLS)
    text = text_of(tmp_path, made, CALLED, [TOOL])
    lines = text.splitlines()
    assert lines[0] == BEGIN + "tools: " + json.dumps([TOOL])
    assert lines[1:] == [
        f"user: ab{IMAGE_TOKEN}",
        'assistant: {"name": "look", "arguments": {"at": 7}}',
        "tool: a cat",
        "assistant: ",
    ]
    without = text_of(tmp_path, made, CALLED, ())
    assert without == BEGIN + "\n".join(lines[1:])


def test_a_template_of_its_own_for_tools_is_taken(tmp_path: Path) -> None:
    """Some models have several templates, by name."""
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(WITH_CALLS)
    made = processor(tmp_path, DEAF)
    assert "tools: " in text_of(tmp_path, made, ASKED, [TOOL])
    assert "tools: " not in text_of(tmp_path, made, ASKED, ())


def test_text_beside_images_reaches_a_template_that_reads_parts(tmp_path: Path) -> None:
    """Messages without an image stand in the same conversation as texts."""
    either = "{% if message.content is string %}{{ message.content }}{% else %}"
    parts = WITH_CALLS.replace(either, "").replace("{% endfor %}{% endif %}", "{% endfor %}")
    assert "is string" not in parts
    messages = [{"role": "system", "content": "brief"}, *ASKED]
    made = processor(tmp_path, parts)
    text = text_of(tmp_path, made, messages, ())
    assert text == f"{BEGIN}system: brief\nuser: ab{IMAGE_TOKEN}\nassistant: "


def test_tools_without_a_place_are_refused_with_the_remedy(tmp_path: Path) -> None:
    made = processor(tmp_path, DEAF)
    assert text_of(tmp_path, made, ASKED, ()) == f"{BEGIN}user: ab{IMAGE_TOKEN}assistant: "
    with pytest.raises(ChangeSomething) as refused:
        text_of(tmp_path, made, ASKED, [TOOL, TOOL])
    assert str(refused.value) == (
        "tools=2 functions: cannot be combined with images in the model's chat template; "
        "leave them out, or serve a model whose template takes tools"
    )


def test_what_a_template_refuses_is_a_refusal(tmp_path: Path) -> None:
    made = processor(tmp_path, STRICT)
    with pytest.raises(ChangeSomething, match="no system message beside images") as refused:
        text_of(tmp_path, made, ASKED, ())
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "name", ["chat_template", "tools", "tokenize", "processor_kwargs", "load_audio_from_video"]
)
def test_no_request_gives_the_processor_arguments(tmp_path: Path, name: str) -> None:
    made = processor(tmp_path, WITH_CALLS)
    with pytest.raises(ChangeSomething, match="is not a variable of chat templates") as refused:
        made.encode(ASKED, [picture(9)], (), {name: "{{ 7 * 191 }}"}, opens_answer=True)
    assert (refused.value.field, refused.value.value) == ("chat_template_kwargs", name)


def test_other_fields_reach_the_template(tmp_path: Path) -> None:
    made = processor(tmp_path, "{{ style }}" + DEAF)
    assert text_of(tmp_path, made, ASKED, (), style="short ").startswith(f"{BEGIN}short user")
