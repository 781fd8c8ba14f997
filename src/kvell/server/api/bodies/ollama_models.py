"""Ollama's descriptions of models."""

from collections.abc import Sequence

from kvell.engine.protocol.statistics import InstanceFacts
from kvell.engine.sampling.model_defaults import find_recommended
from kvell.server.answers.named import NONE
from kvell.server.api.bodies.completions import Body
from kvell.server.api.bodies.ollama import NANOSECONDS, timestamp
from kvell.server.api.serving import LATEST, ServerModel, human_number

VERSION = "0.12.11"
"""The version of Ollama whose interface is served; clients refuse older ones."""
FOREVER_SECONDS = (2**63 - 1) // NANOSECONDS
"""The time after which Ollama unloads a model that it keeps for ever."""
LEVELS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
"""Forms of weights by GGUF's names; those of int8 and int4 have the same numbers in a block."""
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
}
"""Recommended sampling by Ollama's names."""


def tag_entry(name: str, served: ServerModel, facts: InstanceFacts, started: float) -> Body:
    """Return a model's entry in ``/api/tags``.

    :param started: Unix time of the server's start, for models without files.
    """
    stored = served.text.stored
    weights = facts.weights.get(served.key)
    loaded_bytes = 0 if weights is None else weights.size_bytes
    return {
        **_heading(name, served),
        "modified_at": _modified_at(served, started),
        "size": stored.size_bytes or loaded_bytes,
        "details": _details(served, facts),
        "context_length": served.length.reach_tokens,
    }


def loaded_entry(
    name: str, served: ServerModel, instances: Sequence[InstanceFacts], started: float
) -> Body:
    """Return a model's entry in ``/api/ps``.

    Its size is that of its weights and of the memory for requests, which models share.
    """
    size_bytes, device_bytes = _memory_bytes(served.key, instances)
    return {
        **_heading(name, served),
        "size": size_bytes,
        "size_vram": device_bytes,
        "details": _details(served, instances[0] if instances else None),
        "expires_at": timestamp(started + FOREVER_SECONDS),
        "context_length": served.length.reach_tokens,
    }


def description(name: str, served: ServerModel, facts: InstanceFacts, started: float) -> Body:
    text = served.text
    kind = text.model_type
    sizes = {f"{kind}.{size}": count for size, count in text.stored.sizes.items()}
    counted = text.stored.parameters
    return {
        "parameters": _parameters(served),
        "template": text.chat_template,
        "details": _details(served, facts),
        "model_info": {
            "general.architecture": kind,
            "general.basename": name,
            **({"general.parameter_count": counted} if counted else {}),
            **sizes,
            f"{kind}.context_length": served.length.reach_tokens,
        },
        "capabilities": _capabilities(served),
        "modified_at": _modified_at(served, started),
    }


def _heading(name: str, served: ServerModel) -> Body:
    tagged = name if ":" in name else name + LATEST
    return {"name": tagged, "model": tagged, "digest": served.text.stored.digest}


def _modified_at(served: ServerModel, started: float) -> str:
    modified = served.text.stored.modified_unix_seconds
    return timestamp(started if modified is None else modified)


def _details(served: ServerModel, facts: InstanceFacts | None) -> Body:
    kind, counted = served.text.model_type, served.text.stored.parameters
    weights = None if facts is None else facts.weights.get(served.key)
    form = "" if weights is None else weights.form
    return {
        "parent_model": "",
        "format": "gguf" if served.text.stored.is_gguf else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": human_number(counted) if counted else "",
        "quantization_level": LEVELS.get(form, form),
    }


def _capabilities(served: ServerModel) -> list[str]:
    text, answers = served.text, served.answers
    has = {
        "completion": True,
        "tools": bool(text.takes_tools) and answers.tool != NONE,
        "thinking": answers.reasoning != NONE,
        "vision": text.takes_images,
        "insert": text.gap_tokens is not None,
        "embedding": not text.embeddings.problem,
    }
    return [name for name, is_served in has.items() if is_served]


def _parameters(served: ServerModel) -> str:
    recommended = find_recommended(served.text.sampling_defaults)
    lines = (
        f"{_OPTIONS[name]:<30} {value}" for name, value in recommended.items() if name in _OPTIONS
    )
    return "\n".join(lines)


def _memory_bytes(key: str, instances: Sequence[InstanceFacts]) -> tuple[int, int]:
    """Return the bytes of a model in all instances, and those of them on GPUs.

    Instances of one host share their weights, except on GPUs.
    """
    all_bytes = device_bytes = 0
    hosts: set[str] = set()
    for facts in instances:
        weights = facts.weights.get(key)
        reserve_bytes = facts.memory.get("activation_reserve_bytes", 0)
        pool_bytes = facts.memory.get("shared_bytes", 0) or facts.kv_pool_bytes + reserve_bytes
        is_cpu = weights is None or weights.device == "cpu"
        weights_bytes = (
            0 if weights is None or (is_cpu and facts.host in hosts) else weights.size_bytes
        )
        hosts.add(facts.host)
        all_bytes += pool_bytes + weights_bytes
        device_bytes += 0 if is_cpu else pool_bytes + weights_bytes
    return all_bytes, device_bytes
