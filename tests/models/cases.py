"""Which cases of a product the fast suite runs; the others are long.

A family stands for each mechanism, and a few cases cover what goes together with what.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

MECHANISMS = {
    "attention to everything": "LlamaForCausalLM",
    "windows": "Gemma3ForCausalLM",
    "chunks": "Llama4ForCausalLM",
    "latent keys and values": "DeepseekV3ForCausalLM",
    "keys and values of another layer": "Gemma3nForCausalLM",
    "Mamba 1, and no attention": "MambaForCausalLM",
    "Mamba 2 beside attention": "FalconH1ForCausalLM",
    "gated delta rule": "Qwen3NextForCausalLM",
    "lightning attention": "MiniMaxForCausalLM",
    "short convolutions": "Lfm2ForCausalLM",
    "sinks and experts": "GptOssForCausalLM",
    "soft caps": "Gemma2ForCausalLM",
}
"""A family for each mechanism that the engine treats in its own way."""


def long_unless(is_fast: bool) -> tuple[()] | pytest.MarkDecorator:
    return () if is_fast else pytest.mark.long


def families(
    names: Collection[str], fast: Collection[str] = tuple(MECHANISMS.values())
) -> list[ParameterSet]:
    return some_fast(sorted(names), fast)


def some_fast(values: Collection[Any], fast: Collection[Any]) -> list[ParameterSet]:
    marked = [
        pytest.param(value, id=_name(value), marks=long_unless(value in fast)) for value in values
    ]
    assert any(_is_fast(value) for value in marked), "a test without fast cases"
    return marked


def covering(axes: Mapping[str, Sequence[Any]], together: int = 2) -> pytest.MarkDecorator:
    """Parametrize with a product of which the fast suite runs a part.

    :param axes: values by names of parameters (one, or several with commas, whose values are
        tuples); values that are marked long are in no fast case.
    :param together: every combination of the values of so many axes is in some fast case.
    """
    values = [[_value(value, "," in name) for value in some] for name, some in axes.items()]
    rows = list(product(*(range(len(some)) for some in values)))
    allowed = [row for row in rows if all(_is_fast(values[a][i]) for a, i in enumerate(row))]
    fast = set(_covered(allowed, together))
    cases = []
    for row in rows:
        chosen = [values[axis][index] for axis, index in enumerate(row)]
        cases.append(
            pytest.param(
                *(each for value in chosen for each in value.values),
                id="-".join(str(value.id) for value in chosen),
                marks=long_unless(row in fast),
            )
        )
    return pytest.mark.parametrize(",".join(axes), cases)


def _covered(rows: Sequence[tuple[int, ...]], together: int) -> Iterator[tuple[int, ...]]:
    """Rows that have every combination of so many values, each chosen for what it adds."""
    missing = {each for row in rows for each in _combinations(row, together)}
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(_combinations(row, together))))
        missing.difference_update(_combinations(best, together))
        yield best


def _combinations(row: tuple[int, ...], together: int) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(row), together))


def _value(value: Any, is_tuple: bool) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return value._replace(id=value.id or "-".join(map(_name, value.values)))
    parts = value if is_tuple else (value,)
    return pytest.param(*parts, id="-".join(map(_name, parts)))


def _name(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "-".join(map(_name, value))
    return str(getattr(value, "__name__", value))


def _is_fast(value: ParameterSet) -> bool:
    return all(mark.name != "long" for mark in value.marks)
