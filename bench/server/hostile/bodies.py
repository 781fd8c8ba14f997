"""Random hostile bodies for every route of a server, within the bounds of ``check_body``.

Each body is valid JSON of at most ``MOST_BODY_BYTES`` that is costly to handle if any code walks it
without a bound: deep or wide schemas, references to large choices and chains of references, many
blocks, many names, special tokens, many tools, long lists of numbers, fields that contradict each
other.  The same seed yields the same bodies.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, TypeAlias

MOST_BODY_BYTES = 32 << 20
HEADERS = MappingProxyType({"content-type": "application/json"})
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<|endoftext|>",
    "\0",
)
SCALES = (4, 60, 300, 1000, 3400)
"""Numbers of parts of a body; most bodies are small enough to be accepted."""
SIZES = (10, 1000, 60_000, 400_000, 4_000_000)
"""Numbers of characters of a long text."""

Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class HostileRequest:
    """A POST request.

    :param kind: name of the kind of body, such as ``schema`` or ``turns``; for reports.
    """

    kind: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)


def hostile_bodies(seed: int, model: str = "tiny") -> Iterator[HostileRequest]:
    """Yield random requests without end.

    :param model: name of the served model.
    """
    random = Random(seed)
    while True:
        kind = random.choice(list(_KINDS))
        path, fields = _KINDS[kind](random)
        body = json.dumps({"model": model, **fields}, separators=(",", ":")).encode()
        if len(body) <= MOST_BODY_BYTES:
            yield HostileRequest(kind, path, body)


def _schema(random: Random) -> tuple[str, Body]:
    return _with_schema(random, draw_schema(random))


def draw_schema(random: Random) -> Body:
    """Return a JSON schema that is small on the wire and large when its references are followed."""
    return random.choice(_SCHEMAS)(random, random.choice(SCALES))


def _referred_choice(random: Random, parts: int) -> Body:
    """Return a schema with several references to a choice of many names."""
    branches: list[Body] = [{"required": [f"n{i}"]} for i in range(parts)]
    branches += [{"additionalProperties": True}] * random.randrange(2)
    users = {
        f"q{i}": {"properties": {"a": {}}, "anyOf": [{"$ref": "#/$defs/b"}]}
        for i in range(random.choice((1, 12, 200)))
    }
    definition = {random.choice(("anyOf", "oneOf", "allOf")): branches}
    return {"type": "object", "properties": users, "$defs": {"b": definition}}


def _chain(random: Random, parts: int) -> Body:
    """Return a schema whose definitions refer to each other, with names at each step."""
    keyword = random.choice(("allOf", "anyOf", "oneOf"))
    definitions: Body = {}
    for i in range(parts):
        following = [{"$ref": f"#/$defs/d{min(i + step, parts - 1)}"} for step in (1, 1, 2)]
        definitions[f"d{i}"] = {"properties": {f"p{i}": {}}, keyword: following}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _bare_chain(random: Random, parts: int) -> Body:
    """Return a schema with references to references, each resolved for many users."""
    definitions: Body = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(parts)}
    definitions[f"d{parts}"] = {"enum": [f"v{i}" for i in range(parts)]}
    users = {f"q{i}": {"not": {"$ref": "#/$defs/d0"}} for i in range(parts)}
    apart = [{"$ref": f"#/$defs/d{random.randrange(parts)}"} for _ in range(parts)]
    return {"type": "object", "properties": {**users, "o": {"oneOf": apart}}, "$defs": definitions}


def _deep(random: Random, parts: int) -> Body:
    schema: Body = {"type": "string"}
    for i in range(min(parts, random.choice((10, 30, 50)))):
        around = ("properties", "allOf", "anyOf", "items")[i % 4 if random.random() < 0.8 else 0]
        inner: Any = {"properties": {f"a{i}": schema}, "anyOf": [schema], "items": schema}.get(
            around
        )
        schema = {"type": "object", around: inner or [schema, {"required": [f"r{i}"]}]}
    return schema


def _wide(random: Random, parts: int) -> Body:
    names = [f"{'n' * random.choice((1, 30))}{i}" for i in range(parts)]
    schema: Body = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    more: list[Body] = [
        {"required": names},
        {"required": names, "minProperties": 1},
        {"not": {"enum": names}, "enum": names},
        {"patternProperties": {f"^{name}": {} for name in names}},
        {"dependentSchemas": {name: {"required": names[:9]} for name in names}},
        {"properties": {"a": {"type": "array", "uniqueItems": True, "items": {"enum": names}}}},
        {"oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in names]},
    ]
    return schema | random.choice(more)


_SCHEMAS = (_referred_choice, _chain, _bare_chain, _deep, _wide)


def _with_schema(random: Random, schema: Body) -> tuple[str, Body]:
    """Return a request that has a schema in one of the places for it."""
    strict = random.choice(({}, {"strict": True}, {"strict": True}))
    named = {"name": "x", **strict, "schema": schema}
    function = {"name": "f", **strict, "parameters": {"type": "object", **schema}}
    tool = {"type": "function", "function": function}
    other = {"type": "function", "function": {**function, "name": "g"}}
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    respond = {"input": "hi", "max_output_tokens": 2}
    choice = random.choice(({"tool_choice": "required"}, {}, {"parallel_tool_calls": False}))
    places: list[tuple[str, Body]] = [
        (CHAT, hello | {"response_format": {"type": "json_schema", "json_schema": named}}),
        (CHAT, hello | {"structured_outputs": {"json": schema}}),
        (CHAT, hello | {"guided_json": json.dumps(schema)}),
        (CHAT, hello | {"tools": [tool, other], "tool_choice": "required"}),
        (CHAT, hello | {"tools": [tool], **choice, "response_format": {"type": "json_object"}}),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 2, "guided_json": schema}),
        (RESPONSES, respond | {"text": {"format": {"type": "json_schema", **named}}}),
        (RESPONSES, respond | {"tools": [{"type": "function", **function}], **choice}),
        (
            MESSAGES,
            hello | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        (
            MESSAGES,
            hello
            | {
                "tools": [{"name": "f", **strict, "input_schema": {"type": "object", **schema}}],
                "tool_choice": {"type": "any"},
            },
        ),
        ("/api/chat", {**hello, "format": schema, "options": {"num_predict": 2}}),
        ("/api/generate", {"prompt": "hi", "format": schema, "options": {"num_predict": 2}}),
    ]
    return random.choice(places)


def _tools(random: Random) -> tuple[str, Body]:
    """Return a request with many tools."""
    schema = random.choice((_deep, _wide))(random, random.choice((4, 60)))
    tools = [
        {"name": f"f{i}", "description": "d" * random.choice((9, 9000)), "parameters": schema}
        for i in range(random.choice((8, 128)))
    ]
    choice = random.choice(("auto", "required", "none"))
    if random.random() < 0.3:
        return RESPONSES, {
            "input": "hi",
            "max_output_tokens": 2,
            "tools": [{"type": "function", **tool} for tool in tools],
            "tool_choice": choice,
        }
    return CHAT, {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": choice,
    }


def _text(random: Random, parts: int = 1) -> str:
    """Return a long text, of which there will be ``parts``; some are full of special tokens."""
    size = random.choice(SIZES) // parts
    piece = random.choice(("word ", "a", "\u20ac", '"\\', *SPECIAL))
    return piece * max(1, size // len(piece))


def _blocks(random: Random) -> tuple[str, Body]:
    """Return a conversation in Anthropic's format with many blocks."""
    count = random.choice((*SCALES[:4], 4000))
    per_turn = random.choice((1, 2, 60, 1000))
    text = _text(random, random.choice((1, count)))
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": [text[:9]] * 9}}
    blocks: tuple[tuple[str, Body], ...] = (
        ("assistant", {"type": "thinking", "thinking": text, "signature": "s"}),
        ("assistant", {"type": "redacted_thinking", "data": text}),
        ("assistant", use),
        ("user", {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}),
        ("user", {"type": "tool_result", "tool_use_id": "a", "content": text[:99]}),
    )
    chosen = random.choice(blocks)
    messages = []
    while count * len(json.dumps(chosen[1])) > MOST_BODY_BYTES - (1 << 20):
        count //= 2
    for _ in range(max(1, count // per_turn)):
        role, block = random.choice(blocks) if len(text) < 1000 else chosen
        messages.append({"role": role, "content": [block] * min(count, per_turn)})
    fields: Body = {"messages": [*messages, {"role": "user", "content": "go"}]}
    if random.random() < 0.4:
        return f"{MESSAGES}/count_tokens", fields
    return MESSAGES, fields | {"max_tokens": 2}


def _turns(random: Random) -> tuple[str, Body]:
    """Return a conversation with many messages or parts."""
    count = random.choice((*SCALES[:4], 4000))
    text = _text(random, count)
    part = {"type": "text", "text": text}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages: list[Body] = random.choice(
        (
            [{"role": "user", "content": text}] * count,
            [{"role": "user", "content": [part] * min(count, 1000)}],
            [{"role": "assistant", "content": text, "tool_calls": [call] * 9}] * (count // 9),
            [{"role": "assistant", "reasoning_content": text, "extra": [[{}] * 9] * 9}]
            * (count // 9),
            [{"role": "tool", "tool_call_id": "a", "content": text}] * count,
        )
    )
    fields: Body = {"messages": [*messages, {"role": "user", "content": "hi"}]}
    if random.random() < 0.3:
        items = [
            {"role": "user", "content": text},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": text},
            {"type": "web_search_call", "id": "w", "status": text[:9]},
        ]
        chosen = [random.choice(items) for _ in range(count)]
        return RESPONSES, {"input": chosen, "max_output_tokens": 2, "instructions": text}
    return random.choice(((CHAT, fields | {"max_tokens": 2}), ("/tokenize", fields)))


def _arguments(random: Random) -> tuple[str, Body]:
    """Return a conversation whose calls have large or deep arguments."""
    value: Any = {f"k{i}": "v" for i in range(random.choice(SCALES))}
    for _ in range(random.choice((1, 30, 45))):
        value = {"a": value, "b": [1]}
    arguments = random.choice((value, json.dumps(value), "[" * random.choice(SIZES), "{"))
    function = {"name": "f", "arguments": arguments}
    if random.random() < 0.3:
        call = {"type": "function_call", "call_id": "c", **function}
        return RESPONSES, {"input": [call], "max_output_tokens": 2}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    more = {"chat_template_kwargs": {"a": value}, "documents": [{"a": value}]}
    return CHAT, {
        "messages": [message, {"role": "user", "content": "hi"}],
        "max_tokens": 2,
        **random.choice(({}, more)),
    }


def _prompts(random: Random) -> tuple[str, Body]:
    """Return long prompts, as text or token ids."""
    count = random.choice((10, 5000, 400_000, 1_000_000))
    ids = [random.randrange(3, 200)] * count
    text = _text(random)
    several = random.choice((2, 100))
    prompt = random.choice(
        (text, ids, [text[: len(text) // several]] * several, [[5, 6]] * several)
    )
    fields: Body = {"max_tokens": 2, "echo": random.random() < 0.3}
    paths: list[tuple[str, Body]] = [
        (COMPLETIONS, {"prompt": prompt, **fields}),
        ("/v1/embeddings", {"input": prompt}),
        ("/tokenize", {"prompt": text, "return_token_strs": random.random() < 0.5}),
        ("/detokenize", {"tokens": ids}),
        ("/api/generate", {"prompt": text, "raw": True, "options": {"num_predict": 2}}),
    ]
    return random.choice(paths)


def _scores(random: Random) -> tuple[str, Body]:
    """Return many texts to compare."""
    count = random.choice((2, 300, 2000))
    text = _text(random, count)[:2000]
    if random.random() < 0.5:
        return "/v1/score", {
            "text_1": random.choice((text, [text] * count)),
            "text_2": [text] * count,
        }
    documents = random.choice(([text] * count, [{"text": text, "extra": [1]}] * (count // 2)))
    return "/v1/rerank", {"query": text, "documents": documents, "top_n": 3}


def _lists(random: Random) -> tuple[str, Body]:
    """Return sampling fields with many values, valid or not."""
    count = random.choice((1, 100, 128, 1024, 4000))
    directive = {"priority": 1, "start": 0}
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0"}
    fields: list[Body] = [
        {"stop": ["s" * random.choice((1, 1000))] * count},
        {"stop": [1] * count},
        {"logit_bias": {str(i): 1.0 for i in range(count)}},
        {"bad_words": [f"w{i}" for i in range(count)]},
        {"allowed_token_ids": list(range(3, 3 + count))},
        {"allowed_token_ids": [-1] * count},
        {"stop_token_ids": list(range(count))},
        {"structured_outputs": {"choice": [f"c{i}" for i in range(count)]}},
        {"structured_outputs": {"regex": "(a|b)" * count}},
        {"chat_template_kwargs": {f"k{i}": [[]] for i in range(count)}},
        {f"unknown{i}": [[{}]] for i in range(min(count, 200))},
        {"metadata": {f"k{i}": {"a": [1]} for i in range(count)}},
        {"logits_processors": [[{}]] * count},
        {"stream_options": {f"k{i}": 1 for i in range(count)}},
        {
            "kv_hints": {
                "protocol_version": "0.1",
                "message_id": "m",
                "actions": [{**action, "payload": {"directives": [directive] * min(count, 128)}}]
                * random.choice((1, 64)),
            }
        },
    ]
    return _addressed(random, random.choice(fields))


def _contradictions(random: Random) -> tuple[str, Body]:
    """Return fields of which each is valid and all together may not be."""
    fields = {name: random.choice(_VALUES[name]) for name in random.sample(list(_VALUES), 6)}
    return _addressed(random, fields)


def _addressed(random: Random, fields: Body) -> tuple[str, Body]:
    """Return fields with what a route needs."""
    path = random.choice((CHAT, CHAT, COMPLETIONS, RESPONSES, MESSAGES))
    hello = [{"role": "user", "content": "hi"}]
    needed: dict[str, Body] = {
        CHAT: {"messages": hello},
        COMPLETIONS: {"prompt": "hi"},
        RESPONSES: {"input": "hi"},
        MESSAGES: {"messages": hello},
    }
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return path, {**needed[path], limit: 3, **fields}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_JSON = {"type": "json_object"}
_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "allowed_token_ids": ([5], [5, 6, 7]),
        "add_generation_prompt": (True, False),
        "bad_words": (["a"], ["hello", "b"]),
        "best_of": (1, 2, 3),
        "continue_final_message": (True, False),
        "deadline_seconds": (1e-6, 5),
        "early_stopping": (True, False, "never"),
        "echo": (True, False),
        "frequency_penalty": (-2, 0.5),
        "guided_choice": (["a", "b"],),
        "guided_regex": ("a+",),
        "ignore_eos": (True, False),
        "include": ([], ["message.output_text.logprobs"]),
        "length_penalty": (0.0, 1.0, -3.0),
        "logit_bias": ({"5": -100}, {"5": 100, "6": -100}),
        "logprobs": (True, False, 0, 2),
        "max_tokens": (0, 1, 5),
        "max_completion_tokens": (1, 5),
        "min_p": (0, 1, 0.1),
        "min_tokens": (0, 3, 5),
        "n": (1, 2, 3),
        "parallel_tool_calls": (True, False),
        "prompt_logprobs": (0, 1, 2),
        "response_format": (_JSON, {"type": "text"}),
        "seed": (-1, 3, 2**63 - 1),
        "skip_special_tokens": (True, False),
        "stop": ("a", ["a", ""], ["\0"]),
        "stop_token_ids": ([5], [5, 6]),
        "stream": (True, False),
        "stream_options": ({"include_usage": True, "continuous_usage_stats": True}, {}),
        "structured_outputs": ({"regex": "a"}, {"choice": ["a"]}, {"json": {}}),
        "temperature": (0, 2, 1e-9),
        "text": ({"format": _JSON}, {"verbosity": "low"}),
        "thinking": ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1}),
        "thinking_token_budget": (-1, 0, 3),
        "tool_choice": ("none", "auto", "required", {"type": "any"}),
        "tools": ([_TOOL], []),
        "top_k": (-1, 1, 5),
        "top_logprobs": (0, 2, 20),
        "top_p": (1, 0.1),
        "truncate_prompt_tokens": (-1, 1, 5),
        "use_beam_search": (True, False),
        "will_return": (True, False),
    }
)
"""Values of fields, each of which some request may have."""
_KINDS: Mapping[str, Callable[[Random], tuple[str, Body]]] = MappingProxyType(
    {
        "arguments": _arguments,
        "blocks": _blocks,
        "contradictions": _contradictions,
        "lists": _lists,
        "prompts": _prompts,
        "schema": _schema,
        "scores": _scores,
        "tools": _tools,
        "turns": _turns,
    }
)
