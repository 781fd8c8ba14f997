"""From what the user wrote after ``--model`` to a local transformers directory."""

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
from kvell.models.packaged import MODEL_NAME, packaged_model
from kvell.models.progress import Progress, quiet

WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*")
"""What is fetched from the hub: configs, weights, tokenizers; no pickles, no code."""

Fetch = Callable[[str], Path]
"""Fetches a hub model and says where it lies; raises ChangeSomething."""


def fetch_from_hub(model: str) -> Path:
    """Download a model from the Hugging Face hub, or find it in the hub's cache.

    :raises ChangeSomething: if there is no such model, or no way to it.
    """
    try:
        return Path(snapshot_download(model, allow_patterns=list(WANTED_FILES)))
    except GatedRepoError as error:
        raise _refusal(model, "is gated: the hub wants a login with access to it") from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise _refusal(model, "is neither a directory nor a model on the hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise _refusal(model, "is not a directory, and the hub cannot be reached") from error
    except (HfHubHTTPError, OSError) as error:
        raise _refusal(model, f"the hub did not give it ({_first_line(error)})") from error


def resolve_model(
    model: str, cache_dir: Path, progress: Progress = quiet, fetch: Fetch = fetch_from_hub
) -> Path:
    """The local transformers directory of a model.

    :param model: ``smollm2``, a directory, or a hub id such as ``owner/name``.
    :param cache_dir: where the packaged model is kept once converted.
    :raises ChangeSomething: if nothing of that name can be had.
    """
    if model == MODEL_NAME:
        return packaged_model(cache_dir, progress)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        raise _refusal(model, "is a file")
    if _looks_like_path(model):
        raise _refusal(model, "there is no such directory")
    return fetch(model)


def _looks_like_path(model: str) -> bool:
    """Hub ids are ``name`` or ``owner/name``; all else can only mean a path."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model


def _refusal(model: str, problem: str) -> ChangeSomething:
    remedy = f"use {MODEL_NAME}, a transformers directory, or a hub id"
    return ChangeSomething("model", model, problem, remedy)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
