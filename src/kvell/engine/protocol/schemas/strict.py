"""Parts of a schema in which every keyword must be enforced."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvell.engine.protocol.schemas.following import UnenforcedKeyword
from kvell.errors import ChangeSomething


@dataclass(frozen=True)
class StrictPart:
    """A part of a schema in which every keyword must be enforced.

    :param path: the beginning of the paths of its keywords (:class:`.UnenforcedKeyword`); "" for
        the whole schema.
    :param field: the client's name of the part, for errors.
    """

    path: str
    field: str


@dataclass(frozen=True)
class StrictViolation:
    """A keyword of a strict part that the grammar does not enforce.

    :param field: the client's name of the keyword's place.
    """

    field: str
    problem: str

    def error(self) -> ChangeSomething:
        return ChangeSomething(self.field, "…", self.problem, "leave it out, or strict")


def find_violation(
    parts: tuple[StrictPart, ...], unfollowed: Iterable[UnenforcedKeyword]
) -> StrictViolation | None:
    """Return the first keyword that is not enforced in a strict part; None if there is none."""
    starts = tuple(part.path for part in parts)
    for entry in unfollowed:
        if entry.path.startswith(starts):
            part = next(part for part in parts if entry.path.startswith(part.path))
            problem = f"{entry.keyword} cannot be enforced, and strict is true"
            return StrictViolation(f"{part.field}.{entry.path[len(part.path) :]}", problem)
    return None
