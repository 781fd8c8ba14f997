r"""Patterns: one meaning wherever they stand.

``\d`` is a digit of ASCII, ``\w`` such a letter, digit or underscore, ``\s`` a space of ASCII, in a
``regex``, in a grammar, and in a schema; llguidance alone reads them as Unicode in the first two.
"""

import re

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_AROUND = re.compile(r"\(\?(?:[=!]|<[=!]|P=)")
_LARK = re.compile(
    r"""
    (?P<kept> //[^\n]* | \#[^\n]* | "(?:[^"\\\n]|\\.)*" )
    | /(?P<pattern> (?:[^/\\\n]|\\.)+ )/
    """,
    re.VERBOSE | re.DOTALL,
)
"""A comment, a text, or a pattern; a slash begins nothing else in Lark's syntax."""


def ascii_classes(pattern: str) -> str:
    r"""A pattern whose ``\d``, ``\w`` and ``\s`` are written out, and their negations."""

    def written(found: re.Match[str]) -> str:
        letter = found[1]
        if letter == "Z":  # Python's name for the end of the text
            return r"\z"
        inside = _CLASSES.get(letter.lower())
        return found[0] if inside is None else f"[{'^' if letter.isupper() else ''}{inside}]"

    return _ESCAPE.sub(written, pattern)


def ascii_lark(grammar: str) -> str:
    """A grammar in Lark's syntax with the patterns that :func:`ascii_classes` makes."""

    def written(found: re.Match[str]) -> str:
        pattern = found["pattern"]
        return found[0] if pattern is None else f"/{ascii_classes(pattern)}/"

    return _LARK.sub(written, grammar)


def looks_around(pattern: str) -> bool:
    """Whether a pattern looks at what stands around, or back at what it has found.

    No grammar can follow such a pattern.
    """
    escapes = {found[1] for found in _ESCAPE.finditer(pattern)}
    bare = _ESCAPE.sub("", pattern)
    return bool(escapes & set("123456789bBk")) or _AROUND.search(bare) is not None
