"""Bounds on a JSON body, checked on its bytes before it is parsed.

The check is one pass of a regular expression without backtracking, so its time is at most linear
in the length of the body.  It stops at the first exceeded bound and names the field.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvell.errors import ChangeSomething

MANY = {
    **dict.fromkeys(("prompt", "tokens"), 1 << 20),
    **dict.fromkeys(("messages", "input", "tools", "response_format"), 1 << 14),
    **dict.fromkeys(("structured_outputs", "guided_json"), 1 << 14),
    "allowed_token_ids": 1 << 15,
}
"""Larger element bounds of fields that may be long: token ids, conversations, schemas."""
LONGEST_BYTES = 16 << 20
SHORT_BYTES = 1 << 20
FEW = 512
"""A short body with at most this number of commas and opening brackets needs no scan."""
WHOLE = "body"
"""The name that errors use for the whole body instead of a field."""
TOO_PLAIN = f"has more than {LONGEST_BYTES} bytes of numbers or white space"
_QUOTE = ord('"')
AT_ONCE_BYTES = 64 << 10
"""The most bytes in one match: other threads run between two matches only."""
_STRING_PART = rb'[^"\\]{0,%d}+(?:\\.[^"\\]{0,1024}+){0,256}+(?P<end>")?' % AT_ONCE_BYTES
_PIECES = re.compile(
    rb'(?P<token>"%b|[\[{]|[\]}])?+[^"\[\]{}]{0,%d}+' % (_STRING_PART, AT_ONCE_BYTES),
    re.DOTALL,
)
"""A string or bracket, and what follows it up to the next one; of a long string only a part."""
_MORE_OF_STRING = re.compile(_STRING_PART, re.DOTALL)
_HALF_BYTES = re.compile(rb"\xed[\xa0-\xbf]")
_HALF_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_HALVES = re.compile(
    rb"(?:[^\\]{1,64}+|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]).){0,1024}+",
    re.DOTALL,
)
"""Part of a body in which each escaped surrogate is part of a pair."""
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")


@dataclass(frozen=True)
class BodyBounds:
    """The upper bounds of a body.

    :param depth: nesting of arrays and objects, including the body itself.
    :param parts: strings, arrays and objects in one field.
    :param all_parts: strings, arrays and objects in all fields together.
    :param elements: commas and brackets in one field; ``elements_by_field`` has exceptions.
    """

    depth: int = 64
    fields: int = 256
    parts: int = 1 << 16
    all_parts: int = 1 << 17
    elements: int = 4096
    elements_by_field: Mapping[str, int] = field(default_factory=lambda: MappingProxyType(MANY))


def check_body(body: bytes, bounds: BodyBounds) -> None:
    """Check that a body can be parsed at little cost; the parser checks that it is valid JSON.

    :raises ChangeSomething: with the field of the body that exceeds a bound, or ``body``.
    """
    if json.detect_encoding(body[:4]) not in ("utf-8", "utf-8-sig"):
        raise ChangeSomething(WHOLE, "…", "is not UTF-8", "encode it as UTF-8")
    if not _OBJECT.match(body):
        raise ChangeSomething(WHOLE, "…", "is not valid JSON", "send a JSON object")
    if (b"\xed" in body or b"\\u" in body) and _has_half_a_character(body):
        problem = "has an unpaired surrogate, which is not a character"
        raise ChangeSomething(WHOLE, "…", problem, "send whole characters")
    if len(body) <= SHORT_BYTES:
        opened = body.count(b"[") + body.count(b"{")
        if opened <= bounds.depth and opened + body.count(b",") <= FEW:
            return
    _Scan(body, bounds).run(_long_stretch(body))


def _has_half_a_character(body: bytes) -> bool:
    """Return whether the parsed text would have a lone surrogate, which UTF-8 cannot encode."""
    if b"\xed" in body and _has(body, _HALF_BYTES):
        return True
    if b"\\u" not in body or not _has(body, _HALF_ESCAPE):
        return False
    at = 0
    while at < len(body):
        before, at = at, _NO_HALVES.match(body, at).end()  # type: ignore[union-attr]
        if at == before:
            return True
    return False


def _has(body: bytes, pattern: re.Pattern[bytes]) -> bool:
    size = 16 * AT_ONCE_BYTES
    return any(pattern.search(body, start, start + size + 8) for start in range(0, len(body), size))


def _long_stretch(body: bytes) -> int:
    """Return the start of a stretch of ``LONGEST_BYTES`` without a quote, or the body's length.

    The search samples every quarter of that length, so it is faster than the scan and may miss a
    string that is only a little too long; the scan finds those.
    """
    for start in range(0, len(body) - LONGEST_BYTES, LONGEST_BYTES // 4):
        if body.find(b'"', start, start + LONGEST_BYTES) < 0:
            return start
    return len(body)


class _Scan:
    """One pass over a body's strings, brackets and the bytes between them."""

    def __init__(self, body: bytes, bounds: BodyBounds) -> None:
        self._body, self._bounds = body, bounds
        self._depth, self._fields, self._parts, self._elements = 0, 0, 0, 0
        self._all_parts = self._plain_bytes = 0
        self._most = bounds.elements
        self._field = WHOLE
        self._key_comes = False

    def run(self, until: int) -> None:
        """Check every piece before ``until``, the body's end or the start of a too long piece.

        :raises ChangeSomething: at the first exceeded bound.
        """
        at = 0
        while at < until:
            piece = _PIECES.match(self._body, at, until)
            assert piece is not None  # it matches the empty piece too
            start, token_end = piece.span("token")
            at = piece.end()
            if token_end < 0:
                token_end = start = piece.start()
            elif (first := self._body[start]) == _QUOTE:
                if piece["end"] is None:
                    at = token_end = self._end_of_string(start, token_end, until)
                self._string(start, token_end)
            elif first in b"[{":
                self._open()
            else:
                self._depth -= 1
            if start < token_end:
                self._plain_bytes = 0
            if token_end < at:
                self._between(token_end, at)
        if until < len(self._body):
            raise self._exceeds(TOO_PLAIN)

    def _end_of_string(self, start: int, end: int, until: int) -> int:
        """Return the end of a string of which a part is known.

        :raises ChangeSomething: if it has none, or is too long.
        """
        most = min(until, start + LONGEST_BYTES)
        quote = self._body.find(b'"', end, most)
        while quote >= 0:
            escape = self._body.find(b"\\", end, quote)
            if escape < 0:
                return quote + 1
            part = _MORE_OF_STRING.match(self._body, escape, until)
            assert part is not None  # it matches the empty part too
            end = part.end()
            if part["end"] is not None:
                return end
            if end > quote:
                quote = self._body.find(b'"', end, most)
        if most < len(self._body):
            raise self._exceeds(f"has a string of more than {LONGEST_BYTES} bytes")
        raise ChangeSomething(WHOLE, "…", "is not valid JSON", "close its last string")

    def _string(self, start: int, end: int) -> None:
        if end - start > LONGEST_BYTES:
            raise self._exceeds(f"has a string of more than {LONGEST_BYTES} bytes")
        if self._depth == 1 and self._key_comes:
            self._enter(self._body[start + 1 : min(end - 1, start + 65)].decode(errors="replace"))
        else:
            self._part()

    def _enter(self, name: str) -> None:
        self._field = name
        self._parts = 0
        self._elements = 0
        self._most = self._bounds.elements_by_field.get(name, self._bounds.elements)
        self._key_comes = False
        self._fields += 1
        if self._fields > self._bounds.fields:
            self._field = WHOLE
            raise self._exceeds(f"has more than {self._bounds.fields} fields")

    def _open(self) -> None:
        self._depth += 1
        if self._depth > self._bounds.depth:
            raise self._exceeds(f"is nested more than {self._bounds.depth} deep")
        if self._depth == 1:
            self._key_comes = True
        else:
            self._part()
            self._count(1)

    def _part(self) -> None:
        self._parts += 1
        if self._parts > self._bounds.parts:
            raise self._exceeds(f"has more than {self._bounds.parts} strings, arrays and objects")
        self._all_parts += 1
        if self._all_parts > self._bounds.all_parts:
            self._field = WHOLE
            most = self._bounds.all_parts
            raise self._exceeds(f"has more than {most} strings, arrays and objects")

    def _between(self, start: int, end: int) -> None:
        self._plain_bytes += end - start
        if self._plain_bytes >= LONGEST_BYTES:
            raise self._exceeds(TOO_PLAIN)
        if self._depth > 1:
            self._count(self._body.count(b",", start, end))
            return
        text = self._body[start:end].rstrip(b" \t\r\n")
        if text:
            self._key_comes = text.endswith(b",")

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > self._most:
            raise self._exceeds(f"has more than {self._most} elements")

    def _exceeds(self, problem: str) -> ChangeSomething:
        return ChangeSomething(self._field, "…", problem, "send less", bound="body_shape")
