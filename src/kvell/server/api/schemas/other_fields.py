"""Fields that other servers support and Kvell does not: accepted values, and reasons.

Every field of OpenAI's and vLLM's request bodies is either in a schema of this package or in
``other_fields.json``; ``docs/request-fields.md`` is generated from both.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from kvell.equivalents.other import Other
from kvell.wire.decoding import decode_packaged

_TABLES = decode_packaged(
    dict[str, dict[str, Other]], "kvell.server.api.schemas", "other_fields.json"
)


def others_of(*tables: str) -> Mapping[str, Other]:
    """Return the unsupported fields of several tables, by name; a later table replaces fields."""
    return MappingProxyType({name: o for table in tables for name, o in _TABLES[table].items()})


_NAMES = decode_packaged(
    dict[str, tuple[tuple[str, str], ...]], "kvell.server.api.schemas", "field_names.json"
)


def names_of(table: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return patterns of a chat request's fields, and a dialect's names of these fields."""
    return tuple((re.compile(pattern), name) for pattern, name in _NAMES[table])
