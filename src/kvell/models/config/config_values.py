"""Checks of a config's values before any code computes with them, so that an error names the field.

Configs are expanded into lists of layers, labels and experts, and their sizes are multiplied: one
number of twelve digits would fill all memory, or take all day.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import REPAIR_CONFIG

MOST_LAYERS = 1 << 10
MOST_PARTS = 1 << 16
MOST_SIZE = 1 << 24
MOST_INTEGER = 1 << 63
LONGEST_NAME = 128
MOST_CHARS = 64
"""The most characters of a value in an error."""

BOUNDS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"per_layer|interval|every|theta"), MOST_INTEGER),
    (
        re.compile(r"(^|_)(layers?|depths?|blocks|repeats|dense_replace)$|attention_types"),
        MOST_LAYERS,
    ),
    (re.compile(r"(^|_)(labels|experts|groups?)$"), MOST_PARTS),
    (re.compile(r"window|chunk"), MOST_INTEGER),
    (re.compile(r"(^|_)(heads?|size|dim|rank|width|kernel|conv|state|channels)$"), MOST_SIZE),
)
"""The largest whole number of a field by its name; the first pattern that matches counts."""
POSITIVE = frozenset(
    {"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "num_experts_per_tok"}
)
NUMBERS_ABOVE_0 = frozenset({"rope_theta", "factor", "original_max_position_embeddings"})
NUMBERS = NUMBERS_ABOVE_0 | set(
    (
        "low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale "
        "mscale_all_dim partial_rotary_factor rms_norm_eps"
    ).split()
)
"""Fields of rotations and norms, which transformers does not check."""
NAMES = ("model_type",)
LISTS_OF_NAMES = ("architectures", "layer_types", "layers_block_type")


def check_config_values(raw: Mapping[str, object], name: object) -> None:
    """Raise unless all values of a config have sizes that can be computed with.

    :raises ChangeSomething: naming the field.
    """
    for path, field, value in _values(raw, ""):
        if problem := _problem(field, value):
            text = repr(value)
            shown = text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + "…"
            problem = f"its config sets {path[:MOST_CHARS]} to {shown}, {problem}"
            raise ChangeSomething("model", name, problem, REPAIR_CONFIG)


def _values(raw: Mapping[str, object], within: str) -> Iterator[tuple[str, str, object]]:
    """Yield the path, the name and the value of each field; of lists, each number in them."""
    for key, value in raw.items():
        field = str(key)
        path = f"{within}{field}"
        yield path, field, value
        if isinstance(value, Mapping):
            yield from _values(value, f"{path}.")
        elif isinstance(value, list):
            yield from ((path, field, number) for number in _numbers(value))


def _numbers(values: Sequence[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield value


def _problem(field: str, value: object) -> str:
    if field in NAMES and not (value is None or _is_name(value)):
        return "which is not a name"
    if field in LISTS_OF_NAMES and not _is_list_of_names(value):
        return "which is not a list of names"
    if isinstance(value, float) and math.isnan(value):
        return "which is not a number"
    if field in NUMBERS and value is not None:
        if field == "rope_theta" and isinstance(value, list):
            return ""  # of each layer
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "which is not a number"
        if field in NUMBERS_ABOVE_0 and value <= 0:
            return "and it must be above 0"
    if isinstance(value, bool) or not isinstance(value, int):
        return ""
    if field in POSITIVE and value < 1:
        return "and it must be at least 1"
    most = next((most for pattern, most in BOUNDS if pattern.search(field)), MOST_INTEGER)
    return f"and it may be at most {most}" if abs(value) > most else ""


def _is_list_of_names(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_name, value)))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME
