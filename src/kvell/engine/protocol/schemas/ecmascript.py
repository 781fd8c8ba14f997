r"""Patterns of ECMA-262, as JSON schemas have them, in the syntax of the grammars' engine (Rust's).

Both forms of ECMAScript are read as one: a character that only the older form permits stands for
itself (``{`` without a number, ``\_``), and ``\p{…}`` and ``\u{…}`` are those of the newer form.
``\A``, ``\z``, ``\Z``, ``(?P<name>…)`` and ``(?i)`` at the start have Python's meaning.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MOST_NESTED = 100
"""The most groups inside each other; Rust accepts 250."""
_MOST_REPEATS = 1 << 32

_ANYTHING = "(?s:.)"
_SPACES = (
    r"\t\n\v\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
    r"\x{feff}"
)
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
_ESCAPES = {character: f"\\{letter}" for letter, character in _CONTROLS.items()}
PROPERTIES = frozenset(
    (
        "Any ASCII Alphabetic Lowercase Uppercase White_Space ASCII_Hex_Digit Hex_Digit "
        "Ideographic ID_Start ID_Continue XID_Start XID_Continue Emoji Math Dash Diacritic L Lu "
        "Ll Lt LC Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C "
        "Cc Cf Co Cn Letter Uppercase_Letter Lowercase_Letter Titlecase_Letter Cased_Letter "
        "Modifier_Letter Other_Letter Mark Nonspacing_Mark Spacing_Mark Enclosing_Mark Number "
        "Decimal_Number Letter_Number Other_Number Punctuation Connector_Punctuation "
        "Dash_Punctuation Open_Punctuation Close_Punctuation Initial_Punctuation "
        "Final_Punctuation Other_Punctuation Symbol Math_Symbol Currency_Symbol Modifier_Symbol "
        "Other_Symbol Separator Space_Separator Line_Separator Paragraph_Separator Other Control "
        "Format Private_Use Unassigned"
    ).split()
)
SCRIPTS = frozenset(
    (
        "Arabic Armenian Bengali Bopomofo Cherokee Common Cyrillic Devanagari Ethiopic Georgian "
        "Greek Gujarati Gurmukhi Han Hangul Hebrew Hiragana Inherited Kannada Katakana Khmer Lao "
        "Latin Malayalam Mongolian Myanmar Oriya Sinhala Tamil Telugu Thai Tibetan"
    ).split()
)
_QUANTIFIER = re.compile(r"([*+?]|\{([0-9]+)(?:(,)([0-9]*))?\})\??")
_PROPERTY = re.compile(r"\{(?:(General_Category|gc|Script|sc|Script_Extensions|scx)=)?(\w+)\}")
_CODE = re.compile(r"u\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})")
_LOW_SURROGATE = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_OPENING = re.compile(r"\(\?(?::|P?<[^\W\d][\w$]*>|(i)?(s)?(?:-([is]{1,2}))?:)")
_FLAGS = re.compile(r"\(\?([is]{1,2})\)")


class _UnsupportedError(Exception):
    """The pattern has no equivalent that a grammar can follow, or is none of ECMA-262."""


@dataclass
class _Piece:
    """A part of an alternative.

    :param text: its pattern; ``^`` and ``$`` are anchors.
    :param group: the alternatives inside; ``text`` is then what opens the group.
    """

    text: str
    group: "list[list[_Piece]] | None" = None
    quantifier: str = ""


@dataclass
class _Characters:
    """The inside of a class: ranges of characters, and classes by name."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    named: list[str] = field(default_factory=list)


def rust_pattern(pattern: str) -> str | None:
    """Return an equivalent pattern for a whole text, or None if no grammar can follow it.

    None is returned for look-around, word boundaries, back references, anchors inside a pattern,
    characters that are no text, and whatever is no pattern.
    """
    try:
        reader = _Reader(pattern)
        alternatives = reader.alternatives(0)
        if reader.at < len(pattern):
            return None  # a bracket that nothing opens
        written = _whole(alternatives, is_start=False, is_end=False)
    except _UnsupportedError:
        return None
    return f"^(?:{reader.flags}{written})$"


class _Reader:
    """A reader of one pattern.

    :ivar flags: what the whole pattern begins with, in Rust's syntax.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0
        self.flags = ""
        self._does_dot_match_all = False
        if flags := _FLAGS.match(pattern):
            self.at = flags.end()
            self.flags = "(?i)" if "i" in flags[1] else ""
            self._does_dot_match_all = "s" in flags[1]

    def alternatives(self, depth: int) -> list[list[_Piece]]:
        if depth > MOST_NESTED:
            raise _UnsupportedError
        alternatives = [list[_Piece]()]
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            if self._pattern[self.at] == "|":
                self.at += 1
                alternatives.append([])
                continue
            piece = self._piece(depth)
            piece.quantifier = self._quantifier()
            if piece.quantifier and piece.text in ("^", "$"):
                raise _UnsupportedError
            alternatives[-1].append(piece)
        return alternatives

    def _piece(self, depth: int) -> _Piece:
        character = self._pattern[self.at]
        if character == "(":
            return self._group(depth)
        if _QUANTIFIER.match(self._pattern, self.at):
            raise _UnsupportedError  # of nothing
        self.at += 1
        match character:
            case "^" | "$":
                return _Piece(character)
            case ".":
                others = r"[^\n\r\x{2028}\x{2029}]"
                return _Piece(_ANYTHING if self._does_dot_match_all else others)
            case "[":
                return _Piece(self._class())
            case "\\":
                return _Piece(self._escape())
            case _:
                return _Piece(_written(ord(character)))

    def _group(self, depth: int) -> _Piece:
        opening = _OPENING.match(self._pattern, self.at)
        around = self._does_dot_match_all
        begin = "(?:"
        if opening is None:
            if self._pattern.startswith("(?", self.at):
                raise _UnsupportedError
            self.at += 1
        else:
            self.at = opening.end()
            without = opening[3] or ""
            self._does_dot_match_all = "s" not in without and (around or bool(opening[2]))
            begin = "(?i:" if opening[1] else "(?-i:" if "i" in without else "(?:"
        inside = self.alternatives(depth + 1)
        self._does_dot_match_all = around
        if self.at == len(self._pattern):
            raise _UnsupportedError
        self.at += 1
        return _Piece(begin, inside)

    def _quantifier(self) -> str:
        """Read a quantifier; a lazy one permits the same texts as a greedy one."""
        match = _QUANTIFIER.match(self._pattern, self.at)
        if match is None:
            return ""
        self.at = match.end()
        if match[2] is None:
            return match[1]
        if len(match[2]) > 10 or int(match[2]) >= _MOST_REPEATS:
            raise _UnsupportedError
        if match[3] is None:
            return match[1]
        if len(match[4]) > 10 or int(match[4] or 0) >= _MOST_REPEATS:
            return f"{{{match[2]},}}"
        if match[4] and int(match[4]) < int(match[2]):
            raise _UnsupportedError
        return match[1]

    def _escape(self) -> str:
        following = self._pattern[self.at : self.at + 1]
        if following in ("A", "z", "Z"):
            self.at += 1
            return "^" if following == "A" else "$"
        if not following or following in "bBk123456789":
            raise _UnsupportedError
        named = self._named_class()
        return _written(self._character()) if named is None else named

    def _named_class(self) -> str | None:
        letter = self._pattern[self.at : self.at + 1]
        if inside := _CLASSES.get(letter.lower()):
            self.at += 1
            return f"[{'^' if letter.isupper() else ''}{inside}]"
        if letter not in ("p", "P") or self._pattern[self.at + 1 : self.at + 2] != "{":
            return None
        match = _PROPERTY.match(self._pattern, self.at + 1)
        if match is None:
            raise _UnsupportedError
        is_script = match[1] is not None and match[1].lower().startswith("s")
        if match[2] not in (SCRIPTS if is_script else PROPERTIES):
            raise _UnsupportedError
        self.at = match.end()
        return rf"\{letter}{{{f'{match[1]}=' if is_script else ''}{match[2]}}}"

    def _character(self) -> int:
        if code := _CODE.match(self._pattern, self.at):
            self.at = code.end()
            return self._with_low_surrogate(int(code[1] or code[2] or code[3], 16))
        character = self._pattern[self.at]
        self.at += 1
        if character in _CONTROLS:
            return ord(_CONTROLS[character])
        following = self._pattern[self.at : self.at + 1]
        if character == "0" and not following.isdigit():
            return 0
        if character == "c" and following.isascii() and following.isalpha():
            self.at += 1
            return ord(following) % 32
        if character.isdigit():
            raise _UnsupportedError  # an octal number, which only the older form has
        return ord(character)

    def _with_low_surrogate(self, code: int) -> int:
        if 0xD800 <= code < 0xDC00 and (low := _LOW_SURROGATE.match(self._pattern, self.at)):
            self.at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        return code

    def _class(self) -> str:
        is_negated = self._pattern.startswith("^", self.at)
        self.at += is_negated
        inside = _Characters()
        while not self._pattern.startswith("]", self.at):
            first = last = self._atom(inside)
            if self._pattern.startswith("-", self.at) and not self._pattern.startswith(
                "-]", self.at
            ):
                self.at += 1
                last = self._atom(inside)
                if first is None or last is None:  # a class by name is no end of a range
                    inside.ranges.append((ord("-"), ord("-")))
            self._add(inside, first, last)
        self.at += 1
        return _class_of(inside, is_negated=is_negated)

    def _add(self, inside: _Characters, first: int | None, last: int | None) -> None:
        if first is None or last is None:
            inside.ranges += [(end, end) for end in (first, last) if end is not None]
        elif first > last:
            raise _UnsupportedError
        else:
            inside.ranges.append((first, last))

    def _atom(self, inside: _Characters) -> int | None:
        """Read one character of a class; add a class by name to it, and return None."""
        character = self._pattern[self.at : self.at + 1]
        if not character:
            raise _UnsupportedError
        self.at += 1
        if character != "\\":
            return ord(character)
        following = self._pattern[self.at : self.at + 1]
        if not following:
            raise _UnsupportedError
        if following == "b":
            self.at += 1
            return 8
        named = self._named_class()
        if named is None:
            return self._character()
        inside.named.append(named)
        return None


def _class_of(inside: _Characters, *, is_negated: bool) -> str:
    ranges = list(_text_ranges(inside.ranges))
    if not ranges and not inside.named:
        if is_negated:
            return _ANYTHING
        raise _UnsupportedError  # no text has such a character
    body = "".join(
        _written(first) if first == last else f"{_written(first)}-{_written(last)}"
        for first, last in ranges
    )
    return f"[{'^' if is_negated else ''}{body}{''.join(inside.named)}]"


def _text_ranges(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, last in ranges:
        begin = 0xE000 if 0xD800 <= first < 0xE000 else first
        end = 0xD7FF if 0xD800 <= last < 0xE000 else last
        if begin > 0x10FFFF or end > 0x10FFFF:
            raise _UnsupportedError
        if begin <= end:
            yield begin, end


def _written(code: int) -> str:
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise _UnsupportedError
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return _ESCAPES.get(character) or f"\\x{{{code:x}}}"


def _whole(alternatives: list[list[_Piece]], *, is_start: bool, is_end: bool) -> str:
    """Return alternatives for a whole text, with anything where no anchor is.

    :param is_start: whether an anchor stands before them.
    """
    written = []
    for pieces in alternatives:
        first = 0
        last = len(pieces)
        while first < last and pieces[first].text == "^":
            first += 1
        while last > first and pieces[last - 1].text == "$":
            last -= 1
        starts = is_start or first > 0
        ends = is_end or last < len(pieces)
        inner = pieces[first:last]
        if len(inner) == 1 and inner[0].group is not None and not inner[0].quantifier:
            inside = _whole(inner[0].group, is_start=starts, is_end=ends)
            written.append(f"{inner[0].text}{inside})")
            continue
        before = "" if starts else f"{_ANYTHING}*"
        after = "" if ends else f"{_ANYTHING}*"
        written.append(f"{before}{_sequence(inner)}{after}")
    return "|".join(written)


def _sequence(pieces: Sequence[_Piece]) -> str:
    written = []
    for piece in pieces:
        if piece.text in ("^", "$"):
            raise _UnsupportedError
        text = piece.text
        if piece.group is not None:
            text = f"{text}{'|'.join(_sequence(each) for each in piece.group)})"
        written.append(f"{text}{piece.quantifier}")
    return "".join(written)
