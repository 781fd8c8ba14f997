"""Checks of methods and filters of templates, before they make anything large."""

from collections.abc import Callable, Mapping, Sequence

from jinja2.exceptions import SecurityError
from jinja2.filters import do_map

from kvell.models.text.rendering.budget import (
    CONTAINERS,
    MADE_SHIFT,
    MOST_WIDTH,
    READ_SHIFT,
    TEXTS,
    Arguments,
    Datum,
    Keywords,
    RenderBudget,
    WorkExceededError,
)

NUMBER_METHODS = frozenset({"bit_length", "bit_count", "is_integer", "conjugate", "hex"})
"""Methods of numbers that make nothing large."""
SIZED_FILTERS = frozenset(
    {
        "center",
        "indent",
        "wordwrap",
        "truncate",
        "batch",
        "slice",
        "round",
        "tojson",
        "filesizeformat",
    }
)
"""Filters with a width or a number."""
INSTANT_FILTERS = frozenset(
    {"length", "count", "first", "last", "random", "default", "d", "attr", "abs"}
)
"""Filters whose work does not grow with their value."""
SHALLOW_FILTERS = frozenset(
    ("list reverse items batch slice select reject selectattr rejectattr map").split()
)
"""Filters that do not read what the items of a list contain."""
QUADRATIC_FILTERS = frozenset({"urlize", "striptags", "wordwrap", "pprint", "xmlattr"})
LIST_ITEM_UNITS = 4
FILTER_UNITS = 6


def check_method(
    budget: RenderBudget, owner: object, name: str, args: Arguments, kwargs: Keywords
) -> Arguments:
    """Take the units of a call of a method; return its arguments, iterators as lists.

    :raises WorkExceededError: if it would make too much.
    """
    if isinstance(owner, TEXTS):
        budget.charge(len(owner) >> READ_SHIFT)
        check = _TEXT_METHODS.get(name)
        return args if check is None else check(budget, owner, args, kwargs)
    if isinstance(owner, int | float | complex):
        if name not in NUMBER_METHODS:
            raise SecurityError(f"numbers have no method {name} in templates")
        return args
    if isinstance(owner, type):  # dict.fromkeys
        args = tuple(_as_list(budget, arg) for arg in args)
        budget.nest(args)
        budget.charge(sum(len(arg) * (1 + budget.weigh(args)) for arg in args[:1]))
        return args
    for arg in args:
        budget.take_read(arg)
    if isinstance(owner, CONTAINERS) and name in ("index", "count"):
        budget.take_read(owner)
    return args


TextCheck = Callable[[RenderBudget, str | bytes, Arguments, Keywords], Arguments]


def _check_split(budget: RenderBudget, text: Datum, args: Arguments, kwargs: Keywords) -> Arguments:
    separator = next(iter((*args, *kwargs.values())), None)
    is_text = isinstance(separator, TEXTS) and separator
    budget.charge((text.count(separator) if is_text else len(text)) * LIST_ITEM_UNITS)
    return args


def _check_pad(budget: RenderBudget, text: Datum, args: Arguments, kwargs: Keywords) -> Arguments:
    widths = [abs(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, int)]
    budget.require_chars(len(text) + max(widths, default=0))
    return args


def _check_tabs(budget: RenderBudget, text: Datum, args: Arguments, kwargs: Keywords) -> Arguments:
    tabs = text.count("\t" if isinstance(text, str) else b"\t")
    widths = [abs(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, int)]
    budget.require_chars(len(text) + tabs * max(widths, default=8))
    return args


def _check_replacement(
    budget: RenderBudget, text: Datum, args: Arguments, kwargs: Keywords
) -> Arguments:
    if len(args) >= 2:
        _check_replace(budget, text, args)
    return args


def _check_join(budget: RenderBudget, text: Datum, args: Arguments, kwargs: Keywords) -> Arguments:
    if not args:
        return args
    items = _as_list(budget, args[0])
    chars = sum(len(item) for item in items if isinstance(item, TEXTS))
    budget.require_chars(chars + len(items) * len(text))
    return (items, *args[1:])


def _check_translation(
    budget: RenderBudget, text: Datum, args: Arguments, kwargs: Keywords
) -> Arguments:
    largest = max((len(value) for value in _values(args) if isinstance(value, TEXTS)), default=1)
    budget.require_chars(len(text) * largest)
    return args


def _refuse_format(
    budget: RenderBudget, text: Datum, args: Arguments, kwargs: Keywords
) -> Arguments:
    raise SecurityError("this text's formats are not available in templates")


_TEXT_METHODS: Mapping[str, TextCheck] = {
    **dict.fromkeys(("split", "rsplit", "splitlines"), _check_split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_pad),
    **dict.fromkeys(("format", "format_map"), _refuse_format),
    "expandtabs": _check_tabs,
    "replace": _check_replacement,
    "join": _check_join,
    "translate": _check_translation,
}
"""Checks of methods of texts that make more than they read."""


def check_filter(
    context: Datum, name: str, value: Datum, args: Arguments, kwargs: Keywords
) -> Datum:
    """Take the units of a filter; return its value, an iterator as a list where that is needed.

    :raises WorkExceededError: if it would make too much.
    """
    budget: RenderBudget = context.budget
    budget.charge(FILTER_UNITS)
    if isinstance(value, TEXTS):
        budget.charge(len(value) >> READ_SHIFT)
    elif name not in SHALLOW_FILTERS:
        budget.take_conversion(value)
    check = _FILTERS.get(name)
    if check is None:
        return value
    return check(context, value, args, kwargs)


def _sized(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    for width in (*args, *kwargs.values()):
        is_text = isinstance(width, TEXTS)
        size = abs(width) if isinstance(width, int) else len(width) if is_text else 0
        if size > MOST_WIDTH:
            raise WorkExceededError
        lines = 1 + value.count("\n") if isinstance(value, str) else context.budget.weigh(value)
        context.budget.require_chars(size * lines)
    return value


def _replaced(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    given = {**dict(zip(("old", "new", "count"), args, strict=False)), **kwargs}
    _check_replace(context.budget, str(value), (given.get("old"), given.get("new")))
    return value


def _joined(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    budget: RenderBudget = context.budget
    given = {**dict(zip(("d", "attribute"), args, strict=False)), **kwargs}
    items = _as_list(budget, value)
    shown = items
    if (attribute := given.get("attribute")) is not None:
        shown = list(do_map(context, items, attribute=attribute))
    separator = len(str(given.get("d", "")))
    budget.require_chars(sum(map(budget.chars, shown)) + separator * len(items))
    return items


def _formatted(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    context.budget.require_format(str(value), (*args, *kwargs.values()))
    return value


def _summed(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    items = _as_list(context.budget, value)
    if any(isinstance(start, list | tuple) for start in (*args, *kwargs.values())):
        total = sum(len(item) for item in items if isinstance(item, list | tuple))
        context.budget.charge(total * (1 + len(items)) >> MADE_SHIFT)
        context.budget.weigh(items)
    return items


def _listed(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    if hasattr(value, "__len__"):
        context.budget.charge(len(value) * LIST_ITEM_UNITS)
    return value


def _sorted(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    if hasattr(value, "__len__"):
        context.budget.charge(len(value) * len(value).bit_length())
    return value


def _slow(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    context.budget.charge(context.budget.chars(value))
    return value


def _quadratic(context: Datum, value: Datum, args: Arguments, kwargs: Keywords) -> Datum:
    chars = context.budget.chars(value)
    context.budget.charge(chars * chars >> 12)
    return _sized(context, value, args, kwargs)


_FILTERS: Mapping[str, Callable[[Datum, Datum, Arguments, Keywords], Datum]] = {
    **dict.fromkeys(SIZED_FILTERS, _sized),
    **dict.fromkeys(QUADRATIC_FILTERS, _quadratic),
    **dict.fromkeys(("sort", "unique", "min", "max", "groupby", "dictsort"), _sorted),
    **dict.fromkeys(("title", "wordcount", "urlencode"), _slow),
    "replace": _replaced,
    "join": _joined,
    "format": _formatted,
    "sum": _summed,
    "list": _listed,
}
"""Checks of filters that make more than they read, or work more."""


def _check_replace(budget: RenderBudget, text: str | bytes, args: Arguments) -> None:
    old, new = args[:2]
    if isinstance(old, TEXTS) and isinstance(new, TEXTS) and type(old) is type(text):
        times = text.count(old)  # type: ignore[arg-type]
        budget.require_chars(len(text) + times * max(0, len(new) - len(old)))


def _as_list(budget: RenderBudget, value: Datum) -> Datum:
    """Return an iterator's items, each for a unit; other values as they are."""
    return list(value) if hasattr(value, "__next__") else _measured(budget, value)


def _measured(budget: RenderBudget, value: Datum) -> Datum:
    if hasattr(value, "__len__"):
        budget.charge(len(value))
    return value


def _values(args: Arguments) -> Sequence[Datum]:
    return list(args[0].values()) if args and isinstance(args[0], dict) else ()
