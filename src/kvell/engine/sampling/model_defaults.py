"""Sampling defaults from a model's ``generation_config.json``."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.models.config.json_files import read_optional_json

GenerationConfig = Literal["auto", "vllm"]
"""The use of the model's file: ``auto`` applies it, ``vllm`` ignores it (vLLM's names)."""
NEUTRAL = SamplingParams(max_tokens=None)
"""Sampling without recommendations; answers are as long as the model allows."""
FILE = "generation_config.json"
_TAKEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The file's fields that vLLM applies, with their names in ``SamplingParams``."""


def sampling_defaults(path: Path, chosen: GenerationConfig = "auto") -> SamplingParams:
    """Return the default sampling of requests to a model.

    :raises ChangeSomething: naming the invalid field of the file.
    """
    if chosen == "vllm":
        return NEUTRAL
    raw = read_optional_json(path / FILE)
    values = {here: raw[there] for there, here in _TAKEN.items() if raw.get(there) is not None}
    wrong = [name for name, value in values.items() if not _is_number(name, value)]
    try:
        if wrong:
            problem = "is not a whole number" if wrong[0] in _WHOLE else "is not a number"
            raise ChangeSomething(wrong[0], repr(values[wrong[0]])[:40], problem, "")
        return SamplingParams(**{"max_tokens": None} | values)
    except ChangeSomething as error:
        names = {here: there for there, here in _TAKEN.items()}
        value = f"{names[error.field]}: {error.value}"
        remedy = "correct the file, or use --generation-config vllm"
        raise ChangeSomething(str(path / FILE), value, error.problem, remedy) from error


def find_recommended(defaults: SamplingParams) -> dict[str, object]:
    values = {spec.name: getattr(defaults, spec.name) for spec in fields(defaults)}
    return {name: value for name, value in values.items() if value != getattr(NEUTRAL, name)}


def limit_answer(defaults: SamplingParams) -> SamplingParams:
    limit = defaults.max_tokens or SamplingParams.max_tokens
    return replace(defaults, max_tokens=limit)


_WHOLE = frozenset(("top_k", "max_tokens"))


def _is_number(name: str, value: object) -> bool:
    kinds = (int,) if name in _WHOLE else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)
