"""Names that are near to an unknown one."""

import difflib
from collections.abc import Iterable

NEAR = 0.8
"""The least similarity, from 0 to 1, of a name that is worth a mention."""


def nearest(name: str, names: Iterable[str], least: float = NEAR) -> list[str]:
    """Return at most one of the names, if it is near: a slip of the finger, not another word.

    :param least: the least similarity, from 0 to 1.
    """
    return difflib.get_close_matches(name, sorted(names), 1, least)
