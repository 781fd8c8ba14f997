"""Resolution of ``--model`` to a local transformers directory."""

import re
from collections.abc import Callable
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from kvell.errors import ChangeSomething
from kvell.models.sources.packaged import MODEL_NAME, packaged_model
from kvell.models.sources.progress import Progress, quiet

_TAGGED = re.compile(r"(?P<name>\w[\w.-]*(/[\w.-]+)*):(?P<tag>[\w.-]+)")
_HOSTED = re.compile(
    r"(https?://)?(hf\.co|huggingface\.co|ollama\.com|registry\.ollama\.ai)/(?P<id>.+)"
)
_HUB_ID = "a hub id is OWNER/NAME, as in Qwen/Qwen3-0.6B"


def no_model(model: str, problem: str) -> ChangeSomething:
    remedy = f"use {MODEL_NAME}, a transformers directory, or a hub id"
    return ChangeSomething("model", model, problem, remedy)


def ollama_name(model: str) -> ChangeSomething | None:
    """Return the error for a name that only Ollama understands; None for any other.

    No hub id has a colon, or more than one slash.
    """
    hosted = _HOSTED.fullmatch(model)
    if hosted is not None and "ollama" not in hosted[2]:
        own, _, tag = hosted["id"].partition(":")
        if tag or own.lower().endswith("gguf"):
            problem = "is Ollama's name of a GGUF file on the hub, which Kvell does not read"
            return ChangeSomething(
                "model", model, problem, f"use the model's safetensors: {_HUB_ID}"
            )
        return ChangeSomething("model", model, "is Ollama's name or an address", f"use {own}")
    tagged = _TAGGED.fullmatch(model)
    if hosted is None and tagged is None:
        return None
    if tagged is not None and tagged["name"] == MODEL_NAME:
        return ChangeSomething("model", model, "is Ollama's name with a tag", f"use {MODEL_NAME}")
    problem = "is a name of Ollama's library, which Kvell does not read"
    return ChangeSomething("model", model, problem, f"use the model on the hub: {_HUB_ID}")


Fetch = Callable[[str], Path]
"""Function that fetches a hub model and returns its directory; it raises ChangeSomething."""


def resolve_model(
    model: str, cache_dir: Path, progress: Progress = quiet, fetch: Fetch | None = None
) -> Path:
    """Return the local transformers directory of a model.

    :param model: ``smollm2``, a directory, or a hub id such as ``owner/name``.
    :param cache_dir: directory of the converted packaged model.
    :param fetch: fetches hub models; ``hub.fetch_from_hub`` if not given.
    :raises ChangeSomething: if no such model can be found.
    """
    if model == MODEL_NAME:
        return packaged_model(cache_dir, progress)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        raise no_model(model, "is a file")
    if (error := ollama_name(model)) is not None:
        raise error
    if _looks_like_path(model):
        raise no_model(model, "there is no such directory")
    if fetch is None:
        # Imported here: the hub's client takes a while, and most models are local.

        fetch = fetch_from_hub
    return fetch(model)


def resolve_tokenizer(tokenizer: str, cache_dir: Path, progress: Progress = quiet) -> Path:
    """Return the directory of a tokenizer, which is named like a model.

    :raises ChangeSomething: with ``tokenizer`` if no such directory can be found.
    """
    return _resolve_as("tokenizer", tokenizer, cache_dir, progress)


def resolve_draft(model: str, cache_dir: Path, progress: Progress = quiet) -> Path:
    """Return the directory of a draft model, which is named like a model.

    :raises ChangeSomething: with ``speculative_model`` if no such directory can be found.
    """
    return _resolve_as("speculative_model", model, cache_dir, progress)


def _resolve_as(field: str, model: str, cache_dir: Path, progress: Progress) -> Path:
    try:
        return resolve_model(model, cache_dir, progress)
    except ChangeSomething as error:
        raise ChangeSomething(field, model, error.problem, error.remedy) from error


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model


WANTED_FILES = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.jinja",
    "tokenizer*",
    "vocab.txt",
    "merges.txt",
)
"""Files fetched from the hub: configs, weights, tokenizers; no pickles, no code."""


def fetch_from_hub(model: str) -> Path:
    """Download a model from the Hugging Face hub, or find it in the hub's cache.

    :raises ChangeSomething: if the id is malformed, the model does not exist or is gated, the hub
        cannot be reached, or the download fails (an HTTP or file error).
    """
    try:
        return Path(snapshot_download(model, allow_patterns=list(WANTED_FILES)))
    except GatedRepoError as error:
        raise no_model(model, "is gated: the hub wants a login with access to it") from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise no_model(model, "is neither a directory nor a model on the hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise no_model(model, "is not a directory, and the hub cannot be reached") from error
    except (HfHubHTTPError, OSError) as error:
        raise no_model(model, f"the hub did not send it ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
