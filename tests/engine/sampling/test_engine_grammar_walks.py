"""Whatever is drawn among the tokens that a grammar allows ends in a text that obeys it."""

import json
import re

import pytest
from jsonschema import Draft202012Validator

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammars import Grammars
from kvell.models.text.tokenizer import Tokenizer
from tests.engine.sampling.random_schemas import random_schema
from tests.engine.sampling.walking import text_of, walk


@pytest.mark.parametrize("block", range(4))
def test_walks_obey_random_schemas(grammars: Grammars, tokenizer: Tokenizer, block: int) -> None:
    texts = set()
    for seed in range(block * 60, block * 60 + 60):
        schema = random_schema(seed)
        asked = StructuredOutputs(json=json.dumps(schema))
        grammars.check(asked)
        text = text_of(tokenizer, walk(grammars, asked, seed))
        Draft202012Validator(schema).validate(json.loads(text))
        texts.add(text)
    assert len(texts) > 50, "the schemas ask for many things"


PATTERNS = [
    "[a-z]{1,8}",
    "[0-9]{4}-(0[1-9]|1[0-2])-[0-9]{2}",
    "(yes|no)( please)?",
    "(ab){0,5}c?",
    "[^x]{3}x",
    "[àéü🙂]{2,4}",
    r'"[^"\\]{0,6}"',
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_walks_match_the_whole_pattern(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str
) -> None:
    asked = StructuredOutputs(regex=pattern)
    texts = {text_of(tokenizer, walk(grammars, asked, seed)) for seed in range(25)}
    assert len(texts) > 1
    for text in texts:
        assert re.fullmatch(pattern, text, re.DOTALL), text


CHOICES = (
    "yes",
    "yes, of course",
    "no",
    'say "hi"',
    "back\\slash",
    "tab\there\n",
    "é 🙂",
    "|",
    "/x/i",
)


def test_walks_say_one_of_the_choices_and_in_the_end_each(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = StructuredOutputs(choice=CHOICES)
    texts = {text_of(tokenizer, walk(grammars, asked, seed)) for seed in range(150)}
    assert texts == set(CHOICES)


LARK = """
start: sum
sum: product ("+" product){0,2}
product: number | "(" number "-" number ")"
number: /[1-9][0-9]{0,2}/
"""


def test_walks_follow_a_lark_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    number = "[1-9][0-9]{0,2}"
    product = rf"({number}|\({number}-{number}\))"
    asked = StructuredOutputs(grammar=LARK)
    texts = {text_of(tokenizer, walk(grammars, asked, seed)) for seed in range(40)}
    assert len(texts) > 30
    for text in texts:
        assert re.fullmatch(rf"{product}(\+{product}){{0,2}}", text), text
