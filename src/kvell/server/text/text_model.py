"""The front's interface to a tokenizer, and prompts that are ready to be submitted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.request_spec import SentTensor
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.models.config.embeddings import EmbeddingFacts
from kvell.models.loading.stored_model import StoredModel
from kvell.models.text.answer_text import Detokenizer, Preceding
from kvell.models.text.chat_template import NO_FIELDS
from kvell.models.text.gap_tokens import GapTokens

if TYPE_CHECKING:  # it imports tokenizers, which a front loads while its instance starts
    from kvell.models.text.token_offsets import TokenOffsets


class TextModel(Protocol):
    """The text side of a model."""

    name: str
    """The name of the model in requests."""
    vocab_size: int
    """The size of the vocabulary; all token ids are smaller."""
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence; their text is never shown."""
    model_type: str
    """The ``model_type`` of the model's config; "" if it has none."""
    chat_template: str
    """The text of the model's chat templates; "" if it has none."""
    takes_tools: bool | None
    """Whether the chat template renders tools; None without a template."""
    embeddings: EmbeddingFacts
    """The facts about embeddings in the model's files."""
    most_token_bytes: int
    """The UTF-8 bytes of the longest token."""
    takes_images: bool
    """Whether prompts may have images."""
    sampling_defaults: SamplingParams
    """The default sampling parameters; ``max_tokens`` may be None."""

    gap_tokens: GapTokens | None
    """The tokens with which the model fills a gap in a text; None if it has none."""
    stored: StoredModel
    """Sizes and identity of the model's files."""

    def tokenizer_info(self) -> dict[str, object]:
        """Return the tokenizer's settings in JSON, with its class and the chat template."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Return the token ids of a text, int32 ``[tokens]``."""
        ...

    def rendered_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
    ) -> str:
        """Return the text of a conversation, to be encoded without adding special tokens.

        :param tools: functions that the answer may call, in OpenAI's form.
        :param fields: further variables of the chat template.
        :param opens_answer: whether the text ends with the template's generation prompt.
        :param continues_last: whether the text ends with the last message's content, which the
            answer continues.
        """
        ...

    def encode_pictured(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[bytes],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        check: Callable[[str], None] = lambda text: None,
    ) -> tuple[NDArray[np.int32], tuple[SentTensor, ...]]:
        """Return the token ids of a conversation with images, int32 ``[tokens]``, and tensors.

        :param messages: messages whose content has ``{"type": "image"}`` in place of each image.
        :param images: encoded files (PNG, JPEG, WebP, GIF), in the order of their places.
        :param tools: functions that the answer may call, in OpenAI's form.
        :param check: raises if the conversation's text is too long; called before any image is
            decoded.
        :raises ChangeSomething: if an image cannot be read or is too large, or the template does
            not render tools.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; bytes that are not a character become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        ...

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> Detokenizer:
        """Return a new detokenizer for one request, whose prompt is ``after``."""
        ...

    def token_offsets(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> "TokenOffsets":
        """Return the offsets of a new answer's tokens; the prompt is ``after``."""
        ...


@dataclass(frozen=True)
class LoadedTexts:
    """The text sides of an instance's models.

    :param floor_bytes: size of this process before it loaded them, for the memory contract; 0 if
        it was not measured.
    """

    models: Sequence[TextModel]
    floor_bytes: int = 0


@dataclass(frozen=True)
class Texts:
    """The text sides of an instance's models, to be loaded while the instance starts.

    :param names: names of the models; the first model is the default of requests.
    :param load: loads them in that order; called once, in its own thread.
    :param paths: directories of the models; none for models that are loaded already.
    """

    names: Sequence[str]
    load: Callable[[], LoadedTexts]
    paths: Sequence[Path] = ()

    @classmethod
    def of(cls, *models: TextModel) -> "Texts":
        return cls([model.name for model in models], lambda: LoadedTexts(models))
