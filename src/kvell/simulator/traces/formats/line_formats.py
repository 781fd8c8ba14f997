"""Formats, distinguished by all fields of a line, so that none is read in units of another."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvell.errors import ChangeSomething
from kvell.simulator.traces.formats.fields import name_list, wrong

REMEDY = "make its fields those of one format in docs/replay.md, or convert the file to Kvell's"


@dataclass(frozen=True)
class LineFormat:
    """The fields of one format.

    :param name: the format's name in errors, such as ``Mooncake's``.
    :param required: fields of every line.
    :param optional: fields that a line may have besides.
    :param takes_more: whether a line may have any other fields, too.
    """

    name: str
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    takes_more: bool = False

    def has_any(self, fields: Collection[str]) -> bool:
        return not (self.required | self.optional).isdisjoint(fields)

    def missing_fields(self, fields: Collection[str]) -> list[str]:
        return sorted(self.required.difference(fields))

    def foreign(self, fields: Collection[str]) -> list[str]:
        allowed = self.required | self.optional
        return [] if self.takes_more else [name for name in fields if name not in allowed]

    def check_fields(self, place: str, fields: Collection[str]) -> None:
        """Check the fields of a line after the first.

        :raises ChangeSomething: if some are missing, or are not of the format.
        """
        if foreign := self.foreign(fields):
            problem = (
                f"line has {name_list(foreign)}, but the first line's format, {self.name}, has not"
            )
            raise ChangeSomething("--trace", place, problem, REMEDY)
        if missing := self.missing_fields(fields):
            raise wrong(place, missing[0], f"is missing; the first line's format is {self.name}")


def format_of(place: str, raw: Mapping[str, object], formats: Sequence[LineFormat]) -> LineFormat:
    """Return the format of a file by all fields of its first line.

    :raises ChangeSomething: if the line's fields fit no format, or several.
    """
    complete = [each for each in formats if not each.missing_fields(raw)]
    fits = [each for each in complete if not each.foreign(raw)]
    if len(fits) == 1 and (not fits[0].takes_more or complete == fits):
        return fits[0]
    if fits:
        names = " and ".join(each.name for each in complete)
        raise ChangeSomething("--trace", place, f"line has all fields of {names}", REMEDY)
    problem = f"line has fields of no known format ({name_list(list(raw)) or 'none'})"
    nearest = min(formats, key=lambda each: _distance(each, raw))
    if nearest.required & raw.keys():
        problem += f"; of {nearest.name} " + " and ".join(_differences(nearest, raw))
    raise ChangeSomething("--trace", place, problem, REMEDY)


def _distance(each: LineFormat, fields: Collection[str]) -> tuple[bool, int]:
    is_alien = each.required.isdisjoint(fields)
    return is_alien, len(each.missing_fields(fields)) + len(each.foreign(fields))


def _differences(each: LineFormat, fields: Collection[str]) -> list[str]:
    missing = each.missing_fields(fields)
    foreign = each.foreign(fields)
    return [
        *([f"it lacks {name_list(missing)}"] if missing else []),
        *([f"{name_list(foreign)} {'are' if len(foreign) > 1 else 'is'} not"] if foreign else []),
    ]
