"""What the front needs of a tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.tensors import SentTensor
from kvell.front.request_log import RequestTrace
from kvell.models.config.embeddings import EmbeddingFacts
from kvell.models.text.answer_text import Detokenizer, Preceding

if TYPE_CHECKING:  # it brings tokenizers, which a front reads beside its instance
    from kvell.models.text.token_offsets import TokenOffsets

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class TextModel(Protocol):
    """The text side of a model."""

    @property
    def name(self) -> str:
        """The name under which it is served."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence; their text is never shown."""
        ...

    @property
    def model_type(self) -> str:
        """The family's name in the model's config; "" if it has none."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of its chat template, of all if there are several; "" if it has none."""
        ...

    @property
    def takes_tools(self) -> bool | None:
        """Whether its chat template shows tools; None if it has none."""
        ...

    @property
    def embeddings(self) -> EmbeddingFacts:
        """What the model's files say of its embeddings."""
        ...

    def tokenizer_info(self) -> dict[str, object]:
        """Settings of its tokenizer that JSON can express, with the class and the chat template."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Token ids of a text, int32 ``[tokens]``."""
        ...

    @property
    def most_token_bytes(self) -> int:
        """The most bytes of text (UTF-8) that one token stands for."""
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
        """The text of a conversation, to be encoded without adding special tokens.

        :param tools: that the answer may call, in OpenAI's form.
        :param fields: further variables of the chat template.
        :param opens_answer: whether it ends where the answer begins.
        :param continues_last: whether it ends with the last message's text, which the answer
            goes on with.
        """
        ...

    @property
    def takes_images(self) -> bool:
        """Whether its prompts may have images."""
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
        """Token ids of a conversation with images, and the tensors of its images.

        :param messages: whose content has ``{"type": "image"}`` where an image stands.
        :param images: encoded files (PNG, JPEG, WebP, GIF), in the order of their places.
        :param tools: that the answer may call, in OpenAI's form.
        :param check: raises if the conversation's text is too long; no image is decoded before.
        :raises ChangeSomething: if an image cannot be read or is too large, or the template has no
            place for tools.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one token; bytes that form no character become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        ...

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> Detokenizer:
        """A fresh one for one request, whose prompt is ``after``."""
        ...

    def token_offsets(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> "TokenOffsets":
        """Fresh ones for one answer, whose prompt is ``after``."""
        ...

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What is sampled by where a request does not say; ``max_tokens`` may be None."""
        ...


@dataclass(frozen=True)
class LoadedTexts:
    """The text sides of an instance's models.

    :param floor_bytes: of this process before it read them, for the contract; 0 if nobody looked.
    """

    models: Sequence[TextModel]
    floor_bytes: int = 0


@dataclass(frozen=True)
class Texts:
    """The text sides of the models that an instance serves, to be read while it starts.

    :param names: of the models, in order; the first is the one that requests need not name.
    :param load: reads them, in that order; called once, from a thread of its own.
    """

    names: Sequence[str]
    load: Callable[[], LoadedTexts]

    @classmethod
    def of(cls, *models: TextModel) -> "Texts":
        """Of models that are read already."""
        return cls([model.name for model in models], lambda: LoadedTexts(models))


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready to be submitted.

    :param model: as the instance knows it, "" for its first.
    :param session: requests of one session go to one instance, if the routing says so.
    :param tensors: of its images, from the model's processor.
    :param priority: requests with lower ones are served first.
    :param deadline_seconds: it is cancelled if it has not ended so long after its start.
    :param shows_special_tokens: whether special tokens are a part of the answer's text.
    :param trace: follows the request in the front.
    :param tenant: whose it is; "" on a server without keys.
    :param group: prompts of one HTTP request are one; the groups of a tenant take turns.
    """

    token_ids: NDArray[np.int32]
    request_id: str
    cache_salt: str = ""
    model: str = ""
    session: str = ""
    shows_special_tokens: bool = False
    tensors: tuple[SentTensor, ...] = ()
    priority: int = 0
    deadline_seconds: float | None = None
    trace: RequestTrace | None = None
    tenant: str = ""
    group: str = ""
