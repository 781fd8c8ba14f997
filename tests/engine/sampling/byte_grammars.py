"""Grammars over a tokenizer whose tokens are bytes, and a few tags."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from llguidance._lib import LLMatcher, LLTokenizer

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammar_process.sources import source_of

END = 256
MOST_BYTES = 4000


@cache
def byte_tokenizer(*tags: str) -> LLTokenizer:
    """256 bytes, a token that ends, and tags that are one token each."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = [chr(code) for code in (*printable, *range(256, 256 + 68))]
    added = [
        {"id": END + i, "content": tag, "special": i == 0, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, tag in enumerate(("<|end|>", *tags))
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []}
    parts = {"added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    return LLTokenizer(json.dumps({"version": "1.0", **parts}), eos_token=END)


def matcher(asked: StructuredOutputs, tags: Sequence[str] = ()) -> Any:
    tokenizer = byte_tokenizer(*tags)
    made = LLMatcher(tokenizer, source_of(asked, tokenizer).grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(asked: StructuredOutputs, text: str, tags: Sequence[str] = ()) -> bool:
    at = matcher(asked, tags)
    tokens = byte_tokenizer(*tags).tokenize_str(text, parse_special=True)
    return bool(at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting())


def schema_accepts(schema: object, value: object) -> bool:
    """Whether an answer under a schema may be this value, written in the order that it has."""
    asked = StructuredOutputs(json=json.dumps(schema))
    return accepts(asked, json.dumps(value, ensure_ascii=False))


def walked(schema: object, draw: random.Random) -> str:
    """A text that follows a schema, drawn byte by byte."""
    at, text = matcher(StructuredOutputs(json=json.dumps(schema))), list[int]()
    while len(text) < MOST_BYTES:
        bits = int.from_bytes(at.compute_bitmask(), "little")
        token = draw.choice([i for i in range(END + 1) if bits >> i & 1])
        if token == END:
            return str(byte_tokenizer().decode_str(text))
        at.consume_token(token)
        text.append(token)
    raise AssertionError(f"no end after {MOST_BYTES} bytes")
