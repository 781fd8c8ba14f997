"""Grammars in EBNF, as xgrammar's (vLLM) and llama.cpp's GBNF, converted to Lark's syntax.

llguidance's converter does the work.  It mangles some escapes, and ends a rule before a line that
begins with ``|``, so literals, characters and lines are first written in its narrower form.
"""

import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import gbnf_to_lark

RULE = re.compile(r"(?:[^\S\n]*(?:(?:#|//)[^\n]*)?\n)*[^\S\n]*[\w-]+\s*::=")
"""The beginning of a grammar in EBNF, after comments: the name of a rule."""
QUOTED = r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)'
COMMENTS = re.compile(rf"({QUOTED})|(?:\#|//)[^\n]*", re.DOTALL)
PIECES = re.compile(rf"({QUOTED})|(\s+)(\|)?|(?<![\w-])(root)(?![\w-])", re.DOTALL)
CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL
)
NAMED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
WHOLE = "kvell-whole"
"""The rule of the whole text.  Without recursion it becomes a single lexeme, which matches exactly
what the grammar says; the lexemes of a recursive grammar are as long as they can be."""


def is_ebnf(grammar: str) -> bool:
    return RULE.match(grammar) is not None


def ebnf_lark(grammar: str) -> str:
    """Return a grammar in EBNF, with a rule ``root``, in Lark's syntax.

    :raises ValueError: with the converter's line about the place that it cannot read.
    """
    bare = COMMENTS.sub(lambda match: match[1] or "", grammar)
    try:
        return gbnf_to_lark(f"{PIECES.sub(_piece, bare)}\nroot ::= {WHOLE}\n")
    except RecursionError:
        raise ValueError("its parentheses are nested too deeply") from None
    except Exception as error:  # the converter raises plain exceptions
        raise ValueError(str(error).replace(WHOLE, "root")) from error


def _piece(match: re.Match[str]) -> str:
    quoted, space, bar, root = match.groups()
    if root:
        return WHOLE
    if quoted:
        if len(quoted) < 2 or quoted[-1] != {'"': '"', "[": "]"}[quoted[0]]:
            line = match.string.count("\n", 0, match.start()) + 1
            raise ValueError(f"line {line}: {quoted[:20]} has no end")
        inner = quoted[1:-1]
        return _literal(inner) if quoted[0] == '"' else f"[{_characters(inner)}]"
    return f"|{space}" if bar else space


def _literal(inner: str) -> str:
    """Return a literal; control characters, which it cannot have, are characters beside it."""
    parts = [""]
    for character, _ in _unescaped(inner):
        if character in '"\\':
            parts[-1] += "\\" + character
        elif character in "\n\r\t":
            parts[-1] += {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
        elif character < " " or character == "\x7f":
            parts += [f"[{_escaped(character)}]", ""]
        else:
            parts[-1] += character
    if len(parts) == 1:
        return f'"{parts[0]}"'
    written = (part if i % 2 else f'"{part}"' for i, part in enumerate(parts))
    return f"({' '.join(written)})"


def _characters(inner: str) -> str:
    """Return the inside of a class of characters."""
    characters = list(_unescaped(inner))
    start = 1 if characters[:1] == [("^", False)] else 0
    text = "^" * start
    place = start
    while place < len(characters):
        text += _escaped(characters[place][0])
        if characters[place + 1 : place + 2] == [("-", False)] and place + 2 < len(characters):
            text += "-" + _escaped(characters[place + 2][0])
            place += 2
        place += 1
    return text


def _escaped(character: str) -> str:
    is_plain = character.isalnum() or character > "\x7f" or character in " _"
    return character if is_plain else f"\\x{ord(character):02x}"


def _unescaped(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a text, and whether each was escaped.

    :raises ValueError: for an escape that is not one of EBNF.
    """
    for *codes, escaped, plain in CHARACTER.findall(text):
        code = "".join(codes)
        if plain:
            yield plain, False
        elif code:
            if 0xD800 <= int(code, 16) <= 0xDFFF or int(code, 16) > 0x10FFFF:
                raise ValueError(f"\\u{code} is not a character; write the character itself")
            yield chr(int(code, 16)), True
        elif escaped in NAMED or not escaped.isalnum():
            yield NAMED.get(escaped, escaped), True
        else:
            raise ValueError(f"\\{escaped} is not an escape; use \\n, \\t, \\x41 or \\u0041")
