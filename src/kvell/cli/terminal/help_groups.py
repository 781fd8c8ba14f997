"""The groups of options in help texts, and the options that ``--help`` lists."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import click
import msgspec

from kvell.wire.decoding import decode_packaged

OTHER = "Options"


class _Help(msgspec.Struct, frozen=True):
    groups: dict[str, tuple[str, ...]]
    first: frozenset[str]
    examples: dict[str, str]


_HELP = decode_packaged(_Help, "kvell.cli.terminal", "help_groups.json")
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(_HELP.groups)
"""Options by group, in the order of help."""
FIRST = _HELP.first
"""Options that ``--help`` lists; ``--help-all`` lists all."""
EXAMPLES: Mapping[str, str] = MappingProxyType(_HELP.examples)
_PLACES = {flag: n for n, flag in enumerate(flag for flags in GROUPS.values() for flag in flags)}
_GROUP_BY_FLAG = {flag: group for group, flags in GROUPS.items() for flag in flags}


def group_of(names: Iterable[str]) -> str:
    return next((_GROUP_BY_FLAG[name] for name in names if name in _GROUP_BY_FLAG), OTHER)


def place_of(parameter: click.Parameter) -> int:
    return min((_PLACES.get(name, len(_PLACES)) for name in parameter.opts), default=0)


def in_order(groups: Iterable[str]) -> Sequence[str]:
    """Return groups in the order of help; other options come last."""
    order = [*GROUPS, OTHER]
    return sorted(groups, key=order.index)
