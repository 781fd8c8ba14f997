"""Conversion of text to token ids and back, and the ids that end a text."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import one_line, read_optional_json
from kvell.models.text.chat_template import (
    THE_MODELS_OWN,
    ChatTemplate,
    ChosenTemplate,
    read_template,
)
from kvell.models.text.content_format import NO_FIELDS
from kvell.models.text.end_tokens import PLAIN_CLASS, eos_token_ids, ids_of
from kvell.models.text.gap_tokens import GapTokens, gap_tokens
from kvell.models.text.rendering.control_tokens import MARK
from kvell.models.text.token_bytes import most_token_bytes
from kvell.models.text.tokenizer_faults import TOKENIZER_FILES, own_code, tokenizer_fault
from kvell.models.text.tokenizer_settings import plain_settings

TokenIds = NDArray[np.int32]
"""Token ids, int32 [tokens]."""

OWN_FIELDS = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "processor_kwargs", "load_audio_from_video"),
    )
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
        self._spellings: dict[int, str | None] = {}

    @classmethod
    def load(
        cls,
        path: Path,
        chosen: ChosenTemplate = THE_MODELS_OWN,
        overrides: str | None = None,
    ) -> "Tokenizer":
        """Load from a transformers directory.

        :param chosen: the user's choice of its chat template.
        :param overrides: a JSON object of fields in place of those of its ``config.json``.
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

    @property
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

    def spelling(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None for an id outside of it."""
        if token_id not in self._spellings:
            token = self.backend.convert_ids_to_tokens(token_id)
            self._spellings[token_id] = None if token is None else str(token)
        return self._spellings[token_id]

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

    @cached_property
    @override
    def special_ids(self) -> frozenset[int]:
        return frozenset()

    @override
    def spelling(self, token_id: int) -> str | None:
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

    :param overrides: a JSON object of fields in place of those of its ``config.json``.
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
