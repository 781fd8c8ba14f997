"""Settings with command-line flags: fields of a record from which commands derive options."""

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal

Kind = Literal[
    "text",
    "list",
    "path",
    "file",
    "bytes",
    "seconds",
    "length",
    "integer",
    "number",
    "switch",
    "mark",
]
"""The type of a flag's value: a ``list`` is repeated texts, a ``file`` a path that is no directory,
a ``length`` a number of tokens or ``auto`` for None. A ``switch`` has an opposite, a ``mark`` has
none."""


@dataclass(frozen=True)
class Flag:
    """The command-line flag of a setting.

    :ivar help: one line, with the meaning of None.
    :ivar metavar: "" for click's; None for the usual one of the kind.
    :ivar choices: all values, if they are few.
    :ivar least: lower bound of a number; by default 1 for integers, and above 0 for seconds.
    :ivar alias: another name.
    :ivar typed: the default as help shows it; None if help shows none.
    :ivar parse: converts what users type into the setting's value.
    """

    name: str
    kind: Kind
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    typed: object = None
    required: bool = False
    alias: str | None = None
    parse: Callable[[Any], Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.alias is None else (self.name, self.alias)

    @property
    def opposite(self) -> str:
        return f"--no-{self.name.removeprefix('--')}"


def setting(
    default: object,
    flag: str,
    help: str,  # noqa: A002 - click's word
    kind: Kind = "text",
    **more: Any,
) -> Any:
    """Return a field of settings that has a :class:`Flag`.

    :param more: further fields of the flag; ``typed`` is ``default`` unless it is given.
    """
    metadata = {"flag": Flag(flag, kind, help, **{"typed": default, **more})}
    return field(default=default, metadata=metadata)


def setting_of(record: type, name: str) -> Any:
    same = next(each for each in fields(record) if each.name == name)
    return field(default=same.default, metadata=same.metadata)


def settings_with_flag(record: type) -> Iterator[tuple["Field[object]", Flag]]:
    for each in fields(record):
        if "flag" in each.metadata:
            yield each, each.metadata["flag"]
        elif (inner := inner_record(each)) is not None:
            yield from settings_with_flag(inner)


def inner_record(field: "Field[object]") -> type | None:
    make: object = field.default_factory
    return make if isinstance(make, type) and is_dataclass(make) else None
