"""Random JSON schemas whose texts are bounded: a random walk over allowed tokens must end."""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "age", "tags", "a b", "é", "x", 'quo"te', "back\\slash")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -7,
    12,
    "",
    "red",
    "two words",
    'a "b"',
    "ü",
    [1, 2],
)


def random_schema(seed: int) -> Schema:
    """The schema of a seed; an object or an array at its top, for there is more to get wrong."""
    draw = random.Random(seed)
    return _object(draw, 3) if seed % 4 else _array(draw, 3)


def _any_schema(draw: random.Random, depth: int) -> Schema:
    simple = (_integer, _string, _enum, _const, _boolean, _null)
    nested = (_object, _array, _any_of)
    kind = draw.choice((*simple, *nested * 2) if depth else simple)
    return kind(draw, depth - 1)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any_schema(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any_schema(draw, depth),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any_schema(draw, depth) for _ in range(draw.randint(2, 3))]}


def _integer(draw: random.Random, _depth: int) -> Schema:
    low = draw.randint(-2000, 2000)
    return {"type": "integer", "minimum": low, "maximum": low + draw.choice((0, 3, 50, 4000))}


def _string(draw: random.Random, _depth: int) -> Schema:
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 8)}


def _enum(draw: random.Random, _depth: int) -> Schema:
    return {"enum": draw.sample(VALUES, draw.randint(1, 4))}


def _const(draw: random.Random, _depth: int) -> Schema:
    return {"const": draw.choice(VALUES)}


def _boolean(_draw: random.Random, _depth: int) -> Schema:
    return {"type": "boolean"}


def _null(_draw: random.Random, _depth: int) -> Schema:
    return {"type": "null"}
