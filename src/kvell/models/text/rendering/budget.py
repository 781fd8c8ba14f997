"""The budget of one rendering of a chat template: counted operations, and characters it makes.

A template is a program of a model's author. Each loop step, call, filter and operator takes units
from the budget, by the size of what it reads and makes, so that no template computes or allocates
without end. Sizes of nested values are computed once: a list that contains
another twice, and so on, is short and would fill all memory as text.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Datum = Any
"""A value of a template: whatever a request or a template makes."""
Arguments = tuple[Datum, ...]
Keywords = Mapping[str, Datum]
Value = TypeVar("Value")
Nested = TypeVar("Nested", bound=Collection[Datum])

MOST_UNITS = 4_000_000
"""The units of any rendering: about half a second, and at most 32 MB of characters."""
MESSAGE_UNITS, MOST_MESSAGE_UNITS = 16_384, 16_000_000
"""Further units for each message, so that templates may compare messages with each other."""
CHAR_UNITS, MOST_CHAR_UNITS = 2, 64_000_000
"""Further units for each character of the messages."""
CALL_UNITS = 24
READ_SHIFT = 8
"""A unit pays for 256 characters that are read,"""
MADE_SHIFT, WIDE_SHIFT = 3, 1
"""and for 8 that are made, or 2 if they are not ASCII."""
REMEMBERED_UNITS = 16
LARGE_WEIGHT = 64
"""Nested values of more units are remembered."""
MOST_CHARS = 1 << 26
MOST_INTEGER_BITS = 1 << 12
MOST_WIDTH = 1 << 12
"""The largest width or precision of a number or text."""

WIDTHS = re.compile(r"\d+")
TEXTS = (str, bytes)
TEXT = {str}
PLAIN = frozenset((int, float, bool, type(None)))
_NOTHING: dict[str, str] = {}
VIEWS = (type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items()))
CONTAINERS = (dict, list, tuple, set, frozenset, *VIEWS)
_OPERATORS: Mapping[str, Callable[[Datum, Datum], Datum]] = {
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


class WorkExceededError(Exception):
    """A rendering that needs more work than any useful template."""


class RenderBudget:
    """The units that are left for a rendering.

    Methods that generated code calls return their value, so that they can be put around one.
    """

    __slots__ = ("_is_nested", "_weights", "left")

    def __init__(self, units: int = MOST_UNITS) -> None:
        self.left = units
        self._weights: dict[int, tuple[object, int]] = {}
        self._is_nested = False  # whether a value that the template made may contain one twice

    def charge(self, units: int = 1) -> bool:
        """Take units.

        :return: True, for conditions.
        :raises WorkExceededError: if fewer are left.
        """
        self.left -= units
        if self.left < 0:
            raise WorkExceededError
        return True

    def take_read(self, value: Value) -> Value:
        kind = type(value)
        if kind is str:
            self.left -= len(value) >> READ_SHIFT  # type: ignore[arg-type]
        elif kind not in PLAIN:
            self.charge(self.weigh(value))
        return value

    def search(self, value: Value) -> Value:
        """Take the units of a search in a value; dictionaries find a key at once."""
        return value if type(value) is dict else self.take_read(value)

    def take_conversion(self, value: object) -> None:
        if self._is_nested:
            self.charge(self.weigh(value))

    def skim(self, value: Value) -> Value:
        if isinstance(value, (*TEXTS, list, tuple)):
            self.charge(1 + (len(value) >> MADE_SHIFT))
        return value

    def count_made(self, value: Value) -> Value:
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, TEXTS):
            is_wide = isinstance(value, str) and not value.isascii()
            self.charge(1 + (len(value) >> (WIDE_SHIFT if is_wide else MADE_SHIFT)))
        elif isinstance(value, (list, tuple, dict, set)):
            self.charge(1 + (len(value) >> 1))
        return value

    def nest(self, value: Nested) -> Nested:
        """Take the units of a new container, after weighing the containers in it.

        :raises WorkExceededError: if it would be too large as text.
        """
        self.charge(1 + len(value))
        parts: Iterable[object] = value.values() if isinstance(value, dict) else value
        self._is_nested = self._is_nested or any(isinstance(part, CONTAINERS) for part in parts)
        if self._is_nested:
            self.weigh(value)
        return value

    def show(self, value: object) -> object:
        """Take the units of a value that becomes text; return the text of a container."""
        if type(value) is str:
            self.left -= 1 + (len(value) >> (MADE_SHIFT if value.isascii() else WIDE_SHIFT))
            if self.left < 0:
                raise WorkExceededError
            return value
        if isinstance(value, CONTAINERS):
            self.take_conversion(value)
            value = str(value)
        return self.count_made(value)

    def texts(self, values: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(map(self.show, values))

    def take_key(self, value: Value) -> Value:
        if type(value) is tuple:
            self.charge(self.weigh(value))
        return value

    def add(self, *terms: Datum) -> Datum:
        if set(map(type, terms)) == TEXT:  # other texts, such as Markup, escape what is added
            text = "".join(terms)
            self.left -= 1 + (len(text) >> (MADE_SHIFT if text.isascii() else WIDE_SHIFT))
            if self.left < 0:
                raise WorkExceededError
            return text
        total = terms[0]
        for term in terms[1:]:
            before = total
            self._require_small(before, term)
            if isinstance(before, list | tuple) and isinstance(term, list | tuple):
                self.charge(len(before) + len(term))
            total = self.count_made(before + term)
            if isinstance(total, list | tuple):
                self._is_nested = True
                self._remember(total, self.weigh(before) + self.weigh(term))
        return total

    def show_sum(self, *terms: Datum) -> object:
        total = self.add(*terms)
        return total if type(total) is str else self.show(total)

    def subtract(self, left: Datum, right: Datum) -> Datum:
        if type(left) is int and type(right) is int:
            return left - right
        return self.operate("-", left, right)

    def operate(self, sign: str, left: Datum, right: Datum) -> Datum:
        if sign == "*":
            self._require_product(left, right)
        elif sign == "%" and isinstance(left, TEXTS):
            self.require_format(left, right)
        elif sign == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MOST_INTEGER_BITS:
                raise WorkExceededError
        else:
            self._require_small(left, right)
            self.take_read(left)
            self.take_read(right)
        result = self.count_made(_OPERATORS[sign](left, right))
        if isinstance(result, list | tuple):
            self._is_nested = True
            self.weigh(result)
        return result

    def require_format(self, text: str | bytes, values: object) -> None:
        """Check a text with ``%`` and its values before they are put together."""
        pattern = text if isinstance(text, str) else text.decode("latin-1")
        given: Sequence[object] = values if isinstance(values, tuple) else (values,)
        stars = [value for value in given if isinstance(value, int)] if "*" in pattern else []
        self.require_widths(pattern, *stars)
        largest = max(map(self.chars, given), default=0)
        self.require_chars(len(pattern) + pattern.count("%") * largest)

    def require_widths(self, pattern: str, *widths: int) -> None:
        numbers = (*(int(digits[:10]) for digits in WIDTHS.findall(pattern)), *map(abs, widths))
        if max(numbers, default=0) > MOST_WIDTH:
            raise WorkExceededError
        self.charge(len(numbers) * MOST_WIDTH >> READ_SHIFT)

    def require_chars(self, chars: int) -> None:
        if chars > MOST_CHARS:
            raise WorkExceededError
        self.charge(chars >> MADE_SHIFT)

    def count_items(self, values: Iterable[Datum], *, is_new: bool = False) -> Iterator[Datum]:
        """Yield values, each for a unit.

        :param is_new: whether they are containers that are made here.
        """
        for value in values:
            self.charge()
            yield self.nest(value) if is_new else value

    def chars(self, value: object) -> int:
        if isinstance(value, TEXTS):
            return len(value)
        return (1 + self.weigh(value)) << MADE_SHIFT

    def weigh(self, value: object) -> int:
        """Return the units of a value with all that it contains, repetitions included.

        :raises WorkExceededError: if there are more than any rendering may have.
        """
        if isinstance(value, TEXTS):
            return len(value) >> MADE_SHIFT
        if isinstance(value, range):
            return len(value) >> 1
        if not isinstance(value, CONTAINERS):
            return 0
        remembered = self._weights.get(id(value))
        if remembered is not None:
            return remembered[1]
        self.charge(4 + len(value))
        parts: Iterable[object] = value
        weight = len(value)
        if isinstance(value, dict):
            parts = value.values()
            weight += sum(map(self.weigh, value))
        for part in parts:
            if type(part) is str:
                weight += len(part) >> MADE_SHIFT
            elif type(part) not in PLAIN:
                weight += self.weigh(part)
        if not isinstance(value, VIEWS):
            self._remember(value, weight)
        return weight

    def _remember(self, value: object, weight: int) -> None:
        """Store the weight of a value, which keeps its id for as long.

        :raises WorkExceededError: if it is more than any text has.
        """
        if weight > MOST_CHARS >> MADE_SHIFT:
            raise WorkExceededError
        if weight > LARGE_WEIGHT:
            self.charge(REMEMBERED_UNITS)
            self._weights[id(value)] = (value, weight)

    def _require_product(self, left: Datum, right: Datum) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, (*TEXTS, list, tuple)):
                if times > 0:
                    item_chars = 1 if isinstance(value, TEXTS) else 8 + (self.weigh(value) << 4)
                    self.require_chars(len(value) * times * item_chars)
                return
        self._require_small(left, right)

    def _require_small(self, *values: object) -> None:
        for value in values:
            if isinstance(value, int) and value.bit_length() > MOST_INTEGER_BITS:
                raise WorkExceededError
