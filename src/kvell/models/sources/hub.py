"""Models from the Hugging Face hub; imported only when such a model is requested."""

from collections.abc import Sequence
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

from kvell.models.sources.missing_model import no_model

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


def fetch_from_hub(model: str, wanted_files: Sequence[str] = WANTED_FILES) -> Path:
    """Download a model from the Hugging Face hub, or find it in the hub's cache.

    :param wanted_files: patterns of the files that are fetched.
    :raises ChangeSomething: if the id is malformed, the model does not exist or is gated, the hub
        cannot be reached, or the download fails (an HTTP or file error).
    """
    try:
        return Path(snapshot_download(model, allow_patterns=list(wanted_files)))
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
