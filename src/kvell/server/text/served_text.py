"""The text side of a model for the front, which has no weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.request_spec import SentTensor
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.sampling.model_defaults import NEUTRAL, GenerationConfig, sampling_defaults
from kvell.models.config.description import text_config
from kvell.models.config.embeddings import EmbeddingFacts, embedding_facts
from kvell.models.families.plain_config import known_config
from kvell.models.images.processor import PictureProcessor
from kvell.models.loading.stored_model import StoredModel, stored_model
from kvell.models.text.answer_text import Preceding
from kvell.models.text.chat_template import NO_FIELDS, THE_MODELS_OWN, ChosenTemplate
from kvell.models.text.detokenizer import IncrementalDetokenizer, decode_in_slices, token_bytes
from kvell.models.text.token_offsets import TokenOffsets, token_offsets
from kvell.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvell.models.text.chat_template import ChosenTemplate

NO_VECTORS = EmbeddingFacts(0, "has no files that say what its embeddings are")


NOT_STORED = StoredModel()


KNOWN_TOKENS = 8192
"""The number of tokens whose text is cached; few tokens make up most log probabilities."""


class ServedText:
    """A tokenizer, extended to a :class:`kvell.server.text.text_model.TextModel`."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        tokenizer: Tokenizer,
        model_type: str = "",
        processor: PictureProcessor | None = None,
        embeddings: EmbeddingFacts = NO_VECTORS,
        sampling_defaults: SamplingParams = NEUTRAL,
        stored: StoredModel = NOT_STORED,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.model_type = model_type
        self.embeddings = embeddings
        self.stored = stored
        self.gap_tokens = tokenizer.gap_tokens
        self.eos_token_ids = tokenizer.eos_token_ids
        self.most_token_bytes = tokenizer.most_token_bytes
        self.sampling_defaults = sampling_defaults
        template = tokenizer.template
        self.chat_template = template.text if template else ""
        self.takes_tools = template.takes_tools if template else None
        self.takes_images = processor is not None
        self.encode = tokenizer.encode
        self.rendered_chat = tokenizer.rendered_chat
        self.detokenizer = partial(IncrementalDetokenizer, tokenizer)
        self._tokenizer = tokenizer
        self._processor = processor
        self.token_text = lru_cache(KNOWN_TOKENS)(self._token_text)

    @classmethod
    def load(
        cls,
        name: str,
        path: Path,
        generation_config: GenerationConfig = "auto",
        chosen: ChosenTemplate = THE_MODELS_OWN,
        overrides: str | None = None,
        tokenizer_path: Path | None = None,
    ) -> "ServedText":
        """Read the config and the tokenizer in a model's directory.

        :param generation_config: whether the model's recommended sampling is the default.
        :param chosen: the user's choice of its chat template.
        :param overrides: JSON object of fields that replace those of its config.
        :param tokenizer_path: directory of its tokenizer; None for ``path``.
        :raises ChangeSomething: if its files are damaged.
        """
        config = known_config(path, overrides)
        vocab_size = int(text_config(config).vocab_size)
        processor = PictureProcessor.of(path, chosen)
        embeddings = embedding_facts(path, config)
        tokenizer = Tokenizer.load(tokenizer_path or path, chosen, overrides)
        model_type = str(config.model_type)
        defaults = sampling_defaults(path, generation_config)
        stored = stored_model(path, config)
        return cls(name, vocab_size, tokenizer, model_type, processor, embeddings, defaults, stored)

    def tokenizer_info(self) -> dict[str, object]:
        return self._tokenizer.settings()

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
        """Return the token ids of a conversation with images, int32 ``[tokens]``, and tensors."""
        assert self._processor is not None, "only models that take images are asked"
        # Imported here: it needs torch, and most servers never receive a picture.
        from kvell.engine.running.sent_images import to_sent

        ids, tensors = self._processor.encode(
            messages, images, tools or (), fields, opens_answer=opens_answer, check=check
        )
        return ids, tuple(to_sent(name, tensor) for name, tensor in tensors.items())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return decode_in_slices(self._tokenizer, token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return token_bytes(self._tokenizer, token_id)

    def _token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_offsets(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> TokenOffsets:
        """Return the offsets of a new answer's tokens; the prompt is ``after``."""
        return token_offsets(self._tokenizer, skip_special_tokens=skip_special_tokens, after=after)
