"""The directory of a GGUF file: config and tokenizer in transformers' form, weights where they are.

A later start reads its config and tokenizer and the header of the file. It is made again once the
file has another size or time.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import (
    CONFIG_FILE,
    FETCH_AGAIN,
    GENERATION_FILE,
    read_by_library,
)
from kvell.models.gguf.gguf_config import USE_SAFETENSORS
from kvell.models.gguf.gguf_file import GgufFile, read_gguf
from kvell.models.gguf.gguf_tensors import config_from, tensors_of
from kvell.models.sources.converted import MARKER, made_once
from kvell.models.sources.progress import Progress, quiet
from kvell.wire.decoding import MalformedError, decode_json

READER_VERSION = 1
CONTROL = 3
"""GGUF's type of tokens that are not text."""
END_TEXTS = frozenset(
    (
        "</s> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> "
        "<end_of_turn> <|endofturn|>"
    ).split()
)
"""Control tokens that end an answer in llama.cpp, whatever the metadata say."""
PLAIN_SPLITS = frozenset({"", "default", "gpt-2", "smollm", "refact", "starcoder", "command-r"})
"""Rules of byte-level vocabularies that split text as GPT-2's does."""
BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "tekken"})
"""Rules of byte-level vocabularies whose texts begin with a token, unless the file says."""


def gguf_directory(file: Path, cache_dir: Path, progress: Progress = quiet) -> Path:
    """Return the directory of a GGUF file; make it if needed.

    :param file: the file, or any part of a split one.
    :raises ChangeSomething: if it is damaged, or not read.
    """
    header = read_gguf(file)
    first = header.files[0].absolute()  # links of the hub's cache have the parts' names
    stats = {part.name: part.stat() for part in header.files}
    fingerprint = {
        "gguf": str(first),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "reader": READER_VERSION,
    }
    digest = hashlib.blake2b(str(first).encode(), digest_size=6).hexdigest()

    def make(partial: Path) -> None:
        progress("reading the GGUF file's config and tokenizer (once)", 0.1)
        config = config_from(header)
        tensors_of(header, config)
        partial.mkdir()
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=1))
        _write_tokenizer(partial, header)
        progress("done", 1.0)

    return made_once(cache_dir / "gguf" / f"{first.stem}-{digest}", fingerprint, make)


def gguf_source(directory: Path) -> Path | None:
    """Return the GGUF file whose directory this is; None if it is another one."""
    try:
        marker = decode_json((directory / MARKER).read_bytes())
    except (OSError, MalformedError):
        return None
    file = marker.get("gguf") if isinstance(marker, dict) else None
    return Path(file) if isinstance(file, str) else None


def _write_tokenizer(directory: Path, header: GgufFile) -> None:
    """Write the tokenizer, by transformers' reader, and the ids that end an answer.

    :raises ChangeSomething: if the file's rules of splitting text are not known.
    """
    file = header.files[0]
    kind = str(header.metadata.get("tokenizer.ggml.model", ""))
    rules = str(header.metadata.get("tokenizer.ggml.pre", ""))
    if not kind or not header.counts.get("tokenizer.ggml.tokens"):
        return
    # Imported here: transformers' tokenizers take a second to import.
    from transformers.integrations.gguf import gguf_tokenizer_mapping as reader
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    is_known = rules in reader.GGUF_PRE_TOKENIZER_SPLITS or rules in PLAIN_SPLITS
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and not is_known):
        problem = f"has a tokenizer of the kind {kind[:40]!r}, {rules[:40]!r}, which is not read"
        raise ChangeSomething("model", file, problem, USE_SAFETENSORS)
    with read_by_library(file, "has a tokenizer that does not load", FETCH_AGAIN):
        architecture, vocabulary, config = reader.get_gguf_tokenizer(str(file))
        backend, _ = reader.convert_gguf_tokenizer(architecture, vocabulary)
        begins = header.metadata.get("tokenizer.ggml.add_bos_token")
        if begins is None:
            begins = kind == "llama" or rules in BEGINS
        _begin(backend, config["bos_token"] if begins else None)
        named = {name: value for name, value in config.items() if value is not None}
        tokenizer = TokenizersBackend(tokenizer_object=backend, **named)
        tokenizer.save_pretrained(directory)
        ends = _end_ids(header, vocabulary)
        (directory / GENERATION_FILE).write_text(json.dumps({"eos_token_id": ends}))


def _begin(backend: Any, token: str | None) -> None:
    """Let texts begin with a token, or with none."""
    from tokenizers.processors import TemplateProcessing

    if token is None:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B:1")
        return
    backend.post_processor = TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, backend.token_to_id(token))],
    )


def _end_ids(header: GgufFile, vocabulary: dict[str, Any]) -> list[int]:
    named = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    kinds = vocabulary.get("token_type") or ()
    said = {
        index
        for index, (token, kind) in enumerate(zip(vocabulary["tokens"], kinds, strict=False))
        if kind == CONTROL and token in END_TEXTS
    }
    return sorted(said | {value for value in named if isinstance(value, int)})
