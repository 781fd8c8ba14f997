"""Resolution of ``--model`` to a local transformers directory."""

from collections.abc import Callable
from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.models.sources.hub_files import fetched_file, hub_file
from kvell.models.sources.missing_model import no_model, ollama_name
from kvell.models.sources.packaged import MODEL_NAME, packaged_model
from kvell.models.sources.progress import Progress, quiet

Fetch = Callable[..., Path]
"""Function that fetches a hub model, or its files that match patterns, and returns their directory;
it raises ChangeSomething."""


def resolve_model(
    model: str, cache_dir: Path, progress: Progress = quiet, fetch: Fetch | None = None
) -> Path:
    """Return the local transformers directory of a model.

    :param model: ``smollm2``, a directory, a GGUF file, or a hub id such as ``owner/name`` or
        ``owner/name:Q4_K_M``.
    :param cache_dir: directory of converted models.
    :param fetch: fetches hub models; ``hub.fetch_from_hub`` if not given.
    :raises ChangeSomething: if no such model can be found.
    """
    if model == MODEL_NAME:
        return packaged_model(cache_dir, progress)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return _of_gguf(path, cache_dir, progress)
    if path.is_file():
        raise no_model(model, "is a file")
    wanted = hub_file(model)
    if wanted is None and (error := ollama_name(model)) is not None:
        raise error
    if model.endswith(".gguf"):
        raise no_model(model, "there is no such file")
    if wanted is None and _looks_like_path(model):
        raise no_model(model, "there is no such directory")
    if fetch is None:
        # Imported here: the hub's client takes a while, and most models are local.
        from kvell.models.sources.hub import fetch_from_hub

        fetch = fetch_from_hub
    if wanted is not None:
        return _of_gguf(fetched_file(wanted, fetch), cache_dir, progress)
    return fetch(model)


def _of_gguf(file: Path, cache_dir: Path, progress: Progress) -> Path:
    # Imported here: a transformers directory needs nothing of it.
    from kvell.models.sources.gguf_directory import gguf_directory

    return gguf_directory(file, cache_dir, progress)


def resolve_as(field: str, model: str, cache_dir: Path, progress: Progress = quiet) -> Path:
    """Return the directory of a tokenizer or a draft model, which is named like a model.

    :raises ChangeSomething: with ``field`` if no such directory can be found.
    """
    try:
        return resolve_model(model, cache_dir, progress)
    except ChangeSomething as error:
        raise ChangeSomething(field, model, error.problem, error.remedy) from error


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model
