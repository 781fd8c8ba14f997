"""Conversion of text to token ids and back, and the ids that end a text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import (
    FETCH_AGAIN,
    file_bytes,
    not_the_file,
    one_line,
    read_optional_json,
)
from kvell.models.text.chat_template import (
    NO_FIELDS,
    THE_MODELS_OWN,
    ChatTemplate,
    ChosenTemplate,
    read_template,
)
from kvell.models.text.end_tokens import PLAIN_CLASS, eos_token_ids, ids_of
from kvell.models.text.gap_tokens import GapTokens, gap_tokens
from kvell.models.text.rendering.control_tokens import MARK
from kvell.wire.decoding import MalformedError, decode

JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OTHER_FILES = ("merges.txt", "vocab.txt", *SENTENCEPIECE_FILES)
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
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

    :param config: the fields of ``tokenizer_config.json``.
    """
    mapped = config.get("auto_map")
    named = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    names = named if isinstance(named, list) else [named]
    return next((name for name in names if isinstance(name, str)), "")


LARGEST_INTEGER = (1 << 63) - 1
_PLACES = ("_file", "_or_path")
"""Ends of the names of settings that hold places of files on this machine."""


def plain_settings(given: Mapping[str, object]) -> dict[str, object]:
    return {name: _plain(value) for name, value in given.items() if not name.endswith(_PLACES)}


def _plain(value: object) -> object:
    if isinstance(value, bool | float | str | None):
        return value
    if isinstance(value, int):  # "no limit" is written as 10^30
        return value if abs(value) <= LARGEST_INTEGER else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return str(value)  # an added token is its text


LOSSY_FACTOR = 8
"""Growth of a token beyond its spelling, if encoding may change or drop text.

Normal forms make three bytes of nine, white space and unknown words collapse; a text that shrinks
more than eightfold counts as too long.
"""


def most_token_bytes(backend: Any) -> int:
    """Return the most bytes of text (UTF-8) that one token stands for, special tokens included.

    Exact for byte-level tokenizers that change nothing; else :data:`LOSSY_FACTOR` times the longest
    spelling.

    :param backend: a tokenizer of transformers.
    """
    raw = getattr(backend, "backend_tokenizer", None)
    vocabulary: Iterable[str] = backend.get_vocab()
    added = [str(entry.content) for entry in backend.added_tokens_decoder.values()]
    if raw is not None and _keeps_every_byte(raw, backend):
        # A character of a spelling is a byte; only added tokens are spelled literally.
        spelled = max(map(len, vocabulary), default=1)
        return max(1, spelled, *(len(text.encode()) for text in added))
    return LOSSY_FACTOR * max(1, *(len(text.encode()) for text in (*vocabulary, *added)))


def _keeps_every_byte(raw: Any, backend: Any) -> bool:
    """Return whether the texts of a text's tokens, joined, are the text."""
    swallows = any(entry.lstrip or entry.rstrip for entry in backend.added_tokens_decoder.values())
    byte_level = type(raw.decoder).__name__ == "ByteLevel"
    return byte_level and raw.normalizer is None and not swallows


TokenIds = NDArray[np.int32]
"""Token ids, int32 [tokens]."""

OWN_FIELDS = frozenset(
    (
        "conversation messages tools chat_template add_generation_prompt continue_final_message "
        "tokenize tokenizer_kwargs padding truncation max_length return_tensors return_dict "
        "return_assistant_tokens_mask processor_kwargs load_audio_from_video"
    ).split()
)
"""Variables that are not a request's, and arguments of transformers' ``apply_chat_template``."""


class Tokenizer:
    """A model's tokenizer, chat template and end-of-sequence ids.

    :param backend: a tokenizer of transformers.
    :param eos_token_ids: ids that end an answer.
    :param chosen: the user's choice of its chat template.
    :param path: its directory, for messages and for a chat template in an unusual place.
    """

    def __init__(
        self,
        backend: Any,
        eos_token_ids: frozenset[int],
        chosen: ChosenTemplate = THE_MODELS_OWN,
        path: Path | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self._chosen, self._directory = chosen, path
        self.spelling: Callable[[int], str | None] = cache(self._spelling)
        """Returns a token as the vocabulary spells it; None for an id outside of it."""

    @classmethod
    def load(
        cls,
        path: Path,
        chosen: ChosenTemplate = THE_MODELS_OWN,
        overrides: str | None = None,
    ) -> "Tokenizer":
        """Load from a transformers directory.

        :raises ChangeSomething: if the directory holds no tokenizer or a damaged one, or a chat
            template that does not compile.
        """
        require_tokenizer(path)
        try:
            backend = _load_backend(path)
            backend("")  # some settings are only read with a text
        except Exception as error:
            # The tokenizers library raises bare Exception for a damaged file.
            raise tokenizer_fault(path, error) from error
        eos_ids = eos_token_ids(path, overrides) | ids_of(backend.eos_token_id)
        loaded = cls(backend, eos_ids, chosen, path)
        _ = loaded.template  # so that a broken one is refused at the start
        return loaded

    @property
    def knows_text(self) -> bool:
        """Whether texts can be encoded and decoded at all."""
        return True

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`encode_chat` can work."""
        return self.template is not None

    @cached_property
    def gap_tokens(self) -> GapTokens | None:
        """The tokens with which the model fills a gap in a text; None if it has none."""
        return gap_tokens(self._id_of)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, probed once for its content format; None if there is none.

        :raises ChangeSomething: if it does not compile.
        """
        return self._read(self._chosen)

    def _id_of(self, token: str) -> int | None:
        """Return the id of a token by its name; None if there is no such token."""
        index = self.backend.convert_tokens_to_ids(token)
        is_known = index is not None and self.backend.convert_ids_to_tokens(index) == token
        return int(index) if is_known else None

    def choose_template(self, chosen: ChosenTemplate) -> ChatTemplate | None:
        """Return the chat template for a user's choice.

        :raises ChangeSomething: if it does not compile.
        """
        return self.template if chosen == THE_MODELS_OWN else self._read(chosen)

    def _read(self, chosen: ChosenTemplate) -> ChatTemplate | None:
        backend = self.backend
        special_tokens, added_tokens = backend.special_tokens_map, backend.added_tokens_decoder
        return read_template(
            backend.chat_template, chosen, self._directory, special_tokens, added_tokens
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Return token ids of a text, int32 [tokens], with the special tokens of the model."""
        escapes = self._chosen.special_tokens_in_text == "escape"
        first, *others = text.split(MARK) if escapes else [text]
        ids = list(self.backend(first, add_special_tokens=add_special_tokens)["input_ids"])
        for piece in others:
            ids += self.backend(piece, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
        template: ChatTemplate | None = None,
    ) -> TokenIds:
        """Return token ids of a conversation, int32 [tokens]: those of :meth:`rendered_chat`."""
        ending = {"opens_answer": opens_answer, "continues_last": continues_last}
        text = self.rendered_chat(messages, tools, fields, **ending, template=template)
        return self.encode(text, add_special_tokens=False)

    def rendered_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
        template: ChatTemplate | None = None,
    ) -> str:
        """Return the text of a conversation up to the assistant's next turn, with special tokens.

        :param messages: ``{"role": …, "content": …}`` in order; content is a text or a list of
            parts, in the template's format.
        :param tools: functions that the answer may call, in OpenAI's form.
        :param fields: further variables of the chat template.
        :param opens_answer: whether to add the beginning of the assistant's turn.
        :param continues_last: whether to leave the last message open, so that the answer continues
            it.
        :param template: from :meth:`choose_template`; the usual one if None.
        :raises ChangeSomething: if there is no chat template, or it refuses the messages.
        """
        template = template or self.template
        if template is None:
            raise ChangeSomething(
                "messages", "…", "the model has no chat template", "send a plain prompt instead"
            )
        if fields:
            check_template_fields(fields)
        try:
            return template.render(
                messages,
                tools,
                fields,
                opens_answer=opens_answer,
                continues_last=continues_last,
            )
        except ChangeSomething:
            raise
        except Exception as error:  # a template may raise anything
            says_why = continues_last and "continue_final_message" in str(error)
            raise ChangeSomething(
                "continue_final_message" if says_why else "messages",
                "…",
                f"the model's chat template refuses them ({one_line(error)})",
                'send a list of {"role": "user", "content": "text"}',
            ) from error

    @cached_property
    def most_token_bytes(self) -> int:
        """The most bytes of text (UTF-8) that one token stands for; reads the vocabulary once."""
        return most_token_bytes(self.backend)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out when it skips special tokens."""
        added: Mapping[int, Any] = self.backend.added_tokens_decoder
        flagged = frozenset(token for token, entry in added.items() if entry.special)
        return flagged if self.backend.is_fast else frozenset(self.backend.all_special_ids)

    @cached_property
    def decoder(self) -> Any:
        """The tokenizers library's decoder, which joins tokens; None for other tokenizers."""
        backend = getattr(self.backend, "backend_tokenizer", None)
        return getattr(backend, "decoder", None)

    def settings(self) -> dict[str, object]:
        """Return its settings as in its files, without names of files, and its chat template."""
        settings = plain_settings(self.backend.init_kwargs)
        settings["tokenizer_class"] = type(self.backend).__name__
        template = self.template
        return settings if template is None else {**settings, "chat_template": template.usual}

    def as_json(self) -> str:
        """Return the tokenizer in the form of the tokenizers library.

        :raises ChangeSomething: if it has no such form.
        """
        backend = getattr(self.backend, "backend_tokenizer", None)
        if backend is None:
            problem = "is not of the tokenizers library, which grammars need"
            raise ChangeSomething("tokenizer", type(self.backend).__name__, problem, "convert it")
        text: str = backend.to_str()
        return text

    def _spelling(self, token_id: int) -> str | None:
        token = self.backend.convert_ids_to_tokens(token_id)
        return None if token is None else str(token)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        ids = [int(token) for token in token_ids]
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


class NoTokenizer(Tokenizer):
    """Stand-in for the tokenizer of a directory that holds none: token ids only.

    Prompts must be token ids, and every output text is empty.
    """

    def __init__(self, path: Path, overrides: str | None = None) -> None:
        super().__init__(None, eos_token_ids(path, overrides))
        self._path = path
        self.special_ids = frozenset()

    @override
    def choose_template(self, chosen: ChosenTemplate) -> None:
        return None

    @property
    @override
    def knows_text(self) -> bool:
        return False

    @cached_property
    @override
    def template(self) -> None:
        return None

    @override
    def encode(self, *_: object, **__: object) -> NoReturn:
        raise _refusal(self._path, "holds no tokenizer")

    @override
    def rendered_chat(self, *_: object, **__: object) -> NoReturn:
        raise _refusal(self._path, "holds no tokenizer")

    @override
    def _spelling(self, token_id: int) -> str | None:
        return None

    @override
    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return ""


def check_template_fields(fields: Mapping[str, Any]) -> None:
    """Raise unless further variables of a chat template are only variables.

    :raises ChangeSomething: if transformers would use one as an argument of its own.
    """
    if own := OWN_FIELDS & fields.keys():
        problem = "is not a variable of chat templates"
        raise ChangeSomething("chat_template_kwargs", min(own), problem, "leave it out")


def tokenizer_or_none(path: Path, overrides: str | None = None) -> Tokenizer:
    """Load the tokenizer of a directory; :class:`NoTokenizer` if it holds none.

    :raises ChangeSomething: if it holds a damaged one.
    """
    if not holds_tokenizer(path):
        return NoTokenizer(path, overrides)
    return Tokenizer.load(path, overrides=overrides)


def holds_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def require_tokenizer(path: Path) -> None:
    """Raise unless a directory holds a tokenizer.

    :raises ChangeSomething: if it holds none.
    """
    if not holds_tokenizer(path):
        raise _refusal(path, "holds no tokenizer")


def _load_backend(path: Path) -> Any:
    """Load without transformers' choice of class, which costs a second, if the files name it."""
    config = read_optional_json(path / "tokenizer_config.json")
    # Code of the model's own is not run; its tokenizer.json is equivalent.
    is_own = bool(own_code(config)) and (path / "tokenizer.json").is_file()
    # Imported here: an instance that serves a front handles no text.
    if is_own or config.get("tokenizer_class") == PLAIN_CLASS:
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _refusal(path: Path, problem: str) -> ChangeSomething:
    return ChangeSomething("model", path, problem, "give prompts as token ids, or add a tokenizer")
