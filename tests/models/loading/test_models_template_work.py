"""Chat templates: the text of transformers, and an end for each that works or grows without one."""

import json
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvell.errors import ChangeSomething
from kvell.models.text.chat_template import chosen_template, read_template
from kvell.models.text.rendering.environment import CompiledTemplate
from tests.models.cases import long_unless

MEMORY_BYTES = 64 << 20
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "café <b> & 'x'"},
    {
        "role": "assistant",
        "content": "<think>hm</think>\nYes",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, 2.5, None, "é"]}}}],
    },
    {"role": "tool", "content": "12"},
    {"role": "user", "content": [{"type": "text", "text": "and?"}]},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
]

ORDINARY = Path(__file__, "../../../data/ordinary_chat_templates.txt").resolve()
"""A template in each line."""


@pytest.mark.parametrize("template", ORDINARY.read_text().splitlines())
def test_an_ordinary_template_has_the_text_that_transformers_gives_it(template: str) -> None:
    variables = {"eos_token": "</s>"}
    expected = render_jinja_template(
        [MESSAGES], tools=TOOLS, chat_template=template, add_generation_prompt=True, **variables
    )[0][0]
    compiled = CompiledTemplate(template, "chat_template", "given")
    assert compiled.render(MESSAGES, TOOLS, variables, opens_answer=True) == expected


def test_a_template_may_ask_for_the_date_and_refuse() -> None:
    dated = CompiledTemplate("{{ strftime_now('%Y') }}", "chat_template", "given")
    text = dated.render(MESSAGES, None, {}, opens_answer=True)
    assert abs(int(text) - datetime.now().year) <= 1
    refusing = CompiledTemplate("{{ raise_exception('no tools') }}", "chat_template", "given")
    with pytest.raises(Exception, match="no tools"):
        refusing.render(MESSAGES, None, {}, opens_answer=True)


@pytest.mark.parametrize("is_parts", [False, True])
def test_a_message_that_the_answer_continues_stays_open(*, is_parts: bool) -> None:
    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if is_parts else text}

    messages = [message("user", "a"), message("assistant", "So far ")]
    shown = "m.content[0].text" if is_parts else "m.content"
    template = "{% for m in messages %}[{{ " + shown + " | trim }}]{% endfor %}"
    expected = render_jinja_template(
        [messages], chat_template=template, continue_final_message=True
    )[0][0]
    compiled = CompiledTemplate(template, "chat_template", "given")
    text = compiled.render(messages, None, {}, opens_answer=False, continues_last=True)
    assert text == expected == "[a][So far"


GROWS = (
    "{{% set ns = namespace(a={}) %}}"
    "{{% for i in range(60) %}}{{% set ns.a = {} %}}{{% endfor %}}{}"
)
LOOPS = "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{}{{% endfor %}}{{% endfor %}}"
LONG = "{{% set s = 'x' * 1000000 %}}{{% for i in range(99999) %}}{}{{% endfor %}}"
HOSTILE = {
    "loops": LOOPS.format(""),
    "memory": "{{ 'x' * 3000000000 }}",
    "nested lists": GROWS.format("[1]", "[ns.a, ns.a]", "{{ ns.a }}"),
    "doubled text": GROWS.format("'xx'", "ns.a + ns.a", ""),
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "calls": LOOPS.format("{{ loop.length }}"),
    "filtered": LOOPS.replace("99999) %}}{}", "99999) if false %}}{}").format(""),
    "joined text": GROWS.format("'xx'", "ns.a ~ ns.a", ""),
    "added lists": GROWS.format("[1]", "ns.a + ns.a", ""),
    "multiplied lists": GROWS.format("[1]", "[ns.a] * 3", "{{ ns.a | string }}"),
    "compared": GROWS.format("[1]", "[ns.a, ns.a]", "{{ ns.a == [] + ns.a }}"),
    "dict": GROWS.format("1", "dict(a=ns.a, b=ns.a)", "{{ ns.a | tojson }}"),
    "hashed": GROWS.format("(1,)", "(ns.a, ns.a)", "{{ {ns.a: 1} }}"),
    "batched": GROWS.format("[1, 1]", "(ns.a + ns.a) | batch(2) | list", "{{ ns.a }}"),
    "filled": GROWS.format("[1]", "[1] | batch(9, ns.a) | list", "{{ ns.a }}"),
    "keys": GROWS.format("1", "{}.fromkeys('ab', ns.a)", "{{ ns.a | pprint }}"),
    "arguments": "{% macro m() %}{% set ns.a = varargs %}{% endmacro %}"
    + GROWS.format("[1]", "ns.a %}{{ m(ns.a, ns.a) }}{% set x = 1", "{{ ns.a }}"),
    "squared": GROWS.format("3", "ns.a * ns.a", "{{ ns.a % 7 }}"),
    "multiplied": "{{ ([1] * 3000000000) | length }}",
    "star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format width": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "repeated fields": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "center": "{{ 'x' | center(999999999) }}",
    "pad": "{{ 'x'.ljust(9999999999) }}",
    "tabs": "{{ ('\\t' * 100000).expandtabs(9999999) }}",
    "replace": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "replaced": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "join": "{{ range(99999) | join('x' * 100000) }}",
    "joined": "{{ ('x' * 100000).join(['a'] * 99999) }}",
    "attribute": "{{ ([{'a': 'x' * 100000}] * 9999) | join(attribute='a') }}",
    "indent": "{{ ('a\\n' * 100000) | indent('x' * 4000) }}",
    "slice": "{{ [1] | slice(999999999) | list }}",
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    "json": "{{ {'a': [1]} | tojson(indent=999999999) }}",
    "filters": LOOPS.format("{% set a = 'a' | upper %}"),
    "lists": "{% for i in range(9999) %}{% set a = range(99999) | list %}{% endfor %}",
    "maps": "{% for i in range(9999) %}{% set a = range(999)|map('string')|list %}{% endfor %}",
    "sums": "{{ ([range(99999) | list] * 1000) | sum(start=[]) | length }}",
    "searches": LONG.format("{% if 'y' in s %}{% endif %}"),
    "comparisons": LONG.format("{% if s == s + '' %}{% endif %}"),
    "methods": LONG.format("{% set t = s.upper() %}"),
    "slices": LONG.format("{% set t = s[1:] %}"),
    "splits": LONG.format("{% set t = s.split('x') %}"),
    "constants": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "constant macro": "{% macro m() %}"
    + "x" * 10_000
    + "{% endmacro %}"
    + LOOPS.format("{{ m() }}"),
    "long bodies": LOOPS.format("{{ messages[0].role == 'a' }}" * 1000),
    "wrapped": "{{ ('x' * 1000000) | wordwrap(1) }}",
    "tags": "{{ ('<!--' * 300000) | striptags }}",
    "titles": LONG.format("{% set t = s | title %}"),
    "compiled": "{% autoescape 'x' * 3000000000 %}a{% endautoescape %}",
    "wide": "{{ ('\\u1234' * 40000000) | length }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "bytes": "{{ ('x' * 1000).encode() * 10000000 }}",
    "date": "{{ strftime_now('%c' * 1000000) }}",
    "live": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = [ns.l, 'x' * 100000] %}{% endfor %}",
}

QUICK = frozenset({"memory", "nested lists", "doubled text", "width", "format", "power"})


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(template, id=name, marks=long_unless(name in QUICK))
        for name, template in HOSTILE.items()
    ],
)
def test_a_template_that_works_or_grows_without_end_is_refused(template: str) -> None:
    compiled = CompiledTemplate(template, "chat_template", "given")
    tracemalloc.start()
    try:
        with pytest.raises(ChangeSomething, match="needs too many operations") as refused:
            compiled.render(MESSAGES[:2], None, {}, opens_answer=True)
        assert tracemalloc.get_traced_memory()[1] <= MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert (refused.value.field, refused.value.value) == ("chat_template", "given")


@pytest.mark.parametrize(
    "template",
    [
        "{{ (1).to_bytes(9999999999) }}",
        "{{ lipsum(999999999) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ self._TemplateReference__context.budget }}",
    ],
)
def test_a_template_that_leaves_its_sandbox_fails(template: str) -> None:
    compiled = CompiledTemplate(template, "chat_template", "given")
    with pytest.raises(Exception, match=r"unsafe|undefined|recursion|no loader|no method"):
        compiled.render(MESSAGES, None, {}, opens_answer=True)


@pytest.mark.parametrize(
    "text", ["(" * 5000 + "1" + ")" * 5000, "[" * 300 + "]" * 300, "a" + ".b" * 5000]
)
def test_a_template_that_no_compiler_takes_is_refused(text: str) -> None:
    for template in ("{{ " + text + " }}", "{% for a in [1] %}" * 30 + "{% endfor %}" * 30):
        with pytest.raises(ChangeSomething, match="does not compile"):
            chosen_template(template)


def test_a_template_that_loops_is_refused_when_its_model_is_loaded() -> None:
    with pytest.raises(ChangeSomething, match="needs too many operations"):
        read_template(None, chosen_template(HOSTILE["loops"]), None, {})


def test_a_client_learns_no_file_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% if messages|length > 5 %}" + HOSTILE["memory"] + "{% endif %}")
    template = read_template(None, chosen_template(str(file)), None, {})
    assert template is not None
    assert template.render(MESSAGES, None, {}, opens_answer=True) == ""
    with pytest.raises(ChangeSomething, match="for 10 messages") as refused:
        template.render(MESSAGES * 2, None, {}, opens_answer=True)
    assert (refused.value.field, refused.value.value) == ("chat_template", "…")


def test_a_long_conversation_may_be_compared_with_itself() -> None:
    opening = "{% for m in messages %}{% for n in messages %}"
    text = opening + "{% if n.role > m.role %}x{% endif %}{% endfor %}"
    compiled = CompiledTemplate(text + "{{ m.content }}{% endfor %}", "chat_template", "given")
    messages = [{"role": "user", "content": "question " * 50}] * 600
    assert len(compiled.render(messages, None, {}, opens_answer=True)) == 600 * 450


def test_a_very_long_message_may_be_shown_with_many_tools() -> None:
    tools = [{"function": {"name": f"f{index}", "description": "x" * 1000}} for index in range(500)]
    text = "{{ tools | tojson(indent=4) }}{{ messages[0].content.strip() + '\\n' }}"
    compiled = CompiledTemplate(text, "chat_template", "given")
    message = {"role": "user", "content": "word " * 2_000_000}
    rendered = compiled.render([message], tools, {}, opens_answer=True)
    assert len(rendered) == len(json.dumps(tools, indent=4)) + 10_000_000
