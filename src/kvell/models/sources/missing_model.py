"""The error for a model that cannot be found, and names of Ollama's models."""

import re

from kvell.errors import ChangeSomething
from kvell.models.sources.packaged import MODEL_NAME

_TAGGED = re.compile(r"(?P<name>\w[\w.-]*(/[\w.-]+)*):(?P<tag>[\w.-]+)")
_HOSTED = re.compile(
    r"(https?://)?(hf\.co|huggingface\.co|ollama\.com|registry\.ollama\.ai)/(?P<id>.+)"
)
_HUB_ID = "a hub id is OWNER/NAME, as in Qwen/Qwen3-0.6B"


def no_model(model: str, problem: str) -> ChangeSomething:
    remedy = f"use {MODEL_NAME}, a transformers directory, a GGUF file, or a hub id"
    return ChangeSomething("model", model, problem, remedy)


def ollama_name(model: str) -> ChangeSomething | None:
    """Return the error for a name that only Ollama understands; None for any other.

    No hub id has a colon, or more than one slash.
    """
    hosted = _HOSTED.fullmatch(model)
    if hosted is not None and "ollama" not in hosted[2]:
        own, _, tag = hosted["id"].partition(":")
        if tag:
            problem = f"has a tag, {tag}, that names no type of GGUF's matrices"
            return ChangeSomething("model", model, problem, f"name one, as in {own}:Q4_K_M")
        return ChangeSomething("model", model, "is Ollama's name or an address", f"use {own}")
    tagged = _TAGGED.fullmatch(model)
    if hosted is None and tagged is None:
        return None
    if tagged is not None and tagged["name"] == MODEL_NAME:
        return ChangeSomething("model", model, "is Ollama's name with a tag", f"use {MODEL_NAME}")
    problem = "is a name of Ollama's library, which Kvell does not read"
    return ChangeSomething("model", model, problem, f"use the model on the hub: {_HUB_ID}")
