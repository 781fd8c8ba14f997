r"""Regular expressions with one meaning in a ``regex`` and a grammar.

``\d`` is an ASCII digit, ``\w`` an ASCII letter, digit or underscore, ``\s`` an ASCII space.
llguidance would read them as Unicode in a ``regex`` and a grammar.
"""

import re

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_LARK = re.compile(
    r"""
    (?P<kept> //[^\n]* | \#[^\n]* | "(?:[^"\\\n]|\\.)*" )
    | /(?P<pattern> (?:[^/\\\n]|\\.)+ )/
    """,
    re.VERBOSE | re.DOTALL,
)
"""A comment, a text, or a pattern: in Lark's syntax a slash begins nothing else."""


def ascii_classes(pattern: str) -> str:
    r"""Return a pattern with ``\d``, ``\w``, ``\s`` and their negations written out in ASCII."""

    def written(match: re.Match[str]) -> str:
        letter = match[1]
        if letter == "Z":  # Python's name for the end of the text
            return r"\z"
        inside = _CLASSES.get(letter.lower())
        return match[0] if inside is None else f"[{'^' if letter.isupper() else ''}{inside}]"

    return _ESCAPE.sub(written, pattern)


def ascii_lark(grammar: str) -> str:
    """Return a grammar in Lark's syntax with :func:`ascii_classes` applied to its patterns."""

    def written(match: re.Match[str]) -> str:
        pattern = match["pattern"]
        return match[0] if pattern is None else f"/{ascii_classes(pattern)}/"

    return _LARK.sub(written, grammar)
