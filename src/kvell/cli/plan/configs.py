"""Configs of models: by a short name, as a file, in a directory, or from a hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvell.cli.terminal.files import named_config, near_config
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session
from kvell.errors import ChangeSomething
from kvell.models.sources.progress import Progress

if TYPE_CHECKING:
    from kvell.models.gguf.gguf_file import GgufTensor


def load_config(model: str, session: Session, overrides: str | None = None) -> tuple[Any, Path]:
    """Return the config of a model, for the sizes of its layers and weights, and its path.

    :raises ChangeSomething: if there is no such config.
    """
    with progress_bar("reading the config") as report:
        path = config_path(model, session, report)
        from kvell.models.families.plain_config import sizes_config

        return sizes_config(path, overrides), path


def config_path(model: str, session: Session, report: Progress) -> Path:
    """Return the path of the config that ``--model`` names, or of its directory.

    :raises ChangeSomething: if there is no such config.
    """
    from kvell.models.sources.packaged import MODEL_NAME
    from kvell.models.sources.source import resolve_model

    path = Path(named_config(model)).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        return path
    if model != MODEL_NAME and not path.exists() and (near := near_config(model)):
        problem = "is neither a name of a config nor a local model"
        remedy = f"did you mean {near}? kvell plan --models lists the names; a hub id has an owner"
        raise ChangeSomething("model", model, problem, remedy)
    return resolve_model(model, session.cache_dir, report, fetch_config)


def gguf_tensors(path: Path) -> "Mapping[str, GgufTensor]":
    """Return the tensors of the GGUF file whose config is there; none of another model.

    :raises ChangeSomething: if the file is damaged, or not read.
    """
    from kvell.models.gguf.gguf_file import read_gguf
    from kvell.models.gguf.gguf_tensors import config_from, tensors_of
    from kvell.models.sources.gguf_directory import gguf_source

    file = gguf_source(path)
    if file is None:
        return {}
    header = read_gguf(file)
    return tensors_of(header, config_from(header))


def fetch_config(model: str, wanted_files: Sequence[str] = ()) -> Path:
    """Return the ``config.json`` of a hub model, downloaded or from the hub's cache.

    :param wanted_files: patterns of a GGUF file, whose directory is returned if it is in the cache:
        no model is downloaded for its sizes.
    :raises ChangeSomething: if neither has it.
    """
    import httpx2
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if wanted_files:
            patterns = list(wanted_files)
            return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, httpx2.HTTPError, OSError) as error:
        if wanted_files:
            problem = "has its sizes in a GGUF file that is not downloaded"
            raise ChangeSomething("model", model, problem, "plan the model's hub id") from error
        problem = "is not a local model, and the hub did not send its config.json"
        remedy = "use smollm2, a transformers directory, or a config.json"
        raise ChangeSomething("model", model, problem, remedy) from error
