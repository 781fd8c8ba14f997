"""Reasons why a directory's tokenizer does not load: the faulty file, and the remedy."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import (
    FETCH_AGAIN,
    file_bytes,
    not_the_file,
    one_line,
    read_optional_json,
)
from kvell.wire.decoding import MalformedError, decode

JSON_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OTHER_FILES = ("merges.txt", "vocab.txt", *SENTENCEPIECE_FILES)
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json"),
    *SENTENCEPIECE_FILES,
)
"""Files of which a tokenizer has at least one."""
MAX_TOKENIZER_BYTES = 256 << 20
_ANY_JSON = msgspec.json.Decoder(msgspec.Raw)
OR_IDS = "or give prompts as token ids"


def tokenizer_fault(path: Path, error: Exception) -> ChangeSomething:
    """Return the error of a tokenizer that does not load.

    :param path: the model's directory.
    :param error: the library's error.
    """
    faults = (*_broken(path), *_lacking(path))
    if faults:
        return faults[0]
    problem = f"its tokenizer does not load ({one_line(error)})"
    return ChangeSomething("model", path, problem, f"add another, {OR_IDS}")


def _broken(path: Path) -> Iterator[ChangeSomething]:
    """Yield errors for files that are not what their names promise."""
    for name in JSON_FILES:
        if (path / name).is_file():
            try:
                _check_json(path / name)
            except ChangeSomething as error:
                yield error
    for name in OTHER_FILES:
        file = path / name
        if not file.is_file():
            continue
        with file.open("rb") as stream:
            fault = not_the_file(stream.read(64))
        if fault:
            yield ChangeSomething("model", file, fault, FETCH_AGAIN)
    for file in (path / "chat_template.jinja", *path.glob("additional_chat_templates/*.jinja")):
        try:
            if file.is_file():
                file.read_text(encoding="utf-8")
        except ValueError as error:
            problem = f"is not UTF-8 text ({one_line(error)})"
            yield ChangeSomething("model", file, problem, FETCH_AGAIN)


def _check_json(file: Path) -> None:
    """Check that a file holds a JSON object, of any size, without making it.

    :raises ChangeSomething: if it does not.
    """
    data = file_bytes(file, MAX_TOKENIZER_BYTES)
    try:
        decode(_ANY_JSON, data)
    except MalformedError as error:
        problem = f"is not valid JSON ({one_line(error)})"
        raise ChangeSomething("model", file, problem, FETCH_AGAIN) from error
    if not data.lstrip().startswith(b"{"):
        raise ChangeSomething("model", file, "holds no JSON object", FETCH_AGAIN)


def _lacking(path: Path) -> Iterator[ChangeSomething]:
    """Yield errors for files and packages that are missing."""
    if (path / "tokenizer.json").is_file():
        return
    for name in SENTENCEPIECE_FILES:
        if (path / name).is_file() and find_spec("sentencepiece") is None:
            problem = "needs the package sentencepiece, which is not installed"
            remedy = f"run: pip install sentencepiece; or add a tokenizer.json, {OR_IDS}"
            yield ChangeSomething("model", path / name, problem, remedy)
    if (path / "vocab.json").is_file() and not (path / "merges.txt").is_file():
        problem = "merges.txt is missing next to vocab.json"
        yield ChangeSomething("model", path, problem, f"add merges.txt, {OR_IDS}")
    config = read_optional_json(path / "tokenizer_config.json")
    if own := own_code(config):
        problem = f"its tokenizer is custom code ({own}), which is not run"
        yield ChangeSomething("model", path, problem, f"add a tokenizer.json, {OR_IDS}")
    has_vocabulary = (path / "vocab.json").is_file() or (path / "vocab.txt").is_file()
    if has_vocabulary and not config.get("tokenizer_class"):
        problem = "its tokenizer_config.json does not name a tokenizer_class"
        yield ChangeSomething("model", path, problem, f"name it, add a tokenizer.json, {OR_IDS}")


def own_code(config: dict[str, object]) -> str:
    """Return the class of a tokenizer that is code in the model's directory; "" if it is none.

    :param config: of the tokenizer.
    """
    mapped = config.get("auto_map")
    named = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    names = named if isinstance(named, list) else [named]
    return next((name for name in names if isinstance(name, str)), "")
