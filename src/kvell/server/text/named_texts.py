"""The lookup of the models that a front serves; their tokenizers are loaded later."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.request_spec import SentTensor
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.sampling.model_defaults import NEUTRAL, GenerationConfig, sampling_defaults
from kvell.errors import ChangeSomething
from kvell.flags import setting
from kvell.models.config.description import text_config
from kvell.models.config.embeddings import EmbeddingFacts, embedding_facts
from kvell.models.families.plain_config import known_config
from kvell.models.images.processor import PictureProcessor
from kvell.models.loading.stored_model import StoredModel, stored_model
from kvell.models.sources.progress import Progress
from kvell.models.text.chat_template import NO_FIELDS, THE_MODELS_OWN, ChosenTemplate, ContentFormat
from kvell.models.text.detokenizer import (
    IncrementalDetokenizer,
    Preceding,
    decode_in_slices,
    token_bytes,
)
from kvell.models.text.rendering.control_tokens import SpecialTokensInText
from kvell.models.text.token_offsets import TokenOffsets, token_offsets
from kvell.models.text.tokenizer import Tokenizer
from kvell.server.text.text_model import LoadedTexts, Texts

if TYPE_CHECKING:
    from kvell.models.text.chat_template import ChosenTemplate


@dataclass(frozen=True)
class TextOptions:
    """Options of chat templates and of default sampling."""

    chat_template: str | None = setting(
        None,
        "--chat-template",
        "The first model's chat template, in place of its own.",
        metavar="FILE|TEXT",
    )
    chat_template_content_format: ContentFormat = setting(
        "auto",
        "--chat-template-content-format",
        "What the template gets as content: texts, parts (openai), or as it reads it.",
        choices=get_args(ContentFormat),
    )
    special_tokens_in_text: SpecialTokensInText = setting(
        "escape",
        "--special-tokens-in-text",
        "Whether special tokens named in messages (<|im_end|>) stay text, or are such tokens as"
        " in vLLM.",
        choices=get_args(SpecialTokensInText),
    )
    generation_config: GenerationConfig = setting(
        "auto",
        "--generation-config",
        "Sampling where a request does not say: as the models' generation_config.json"
        " recommends, or vLLM's neutral defaults.",
        choices=get_args(GenerationConfig),
    )


def texts_of(
    models: Sequence[str],
    cache_dir: Path,
    progress: Progress,
    options: TextOptions | None = None,
    *,
    served_names: Sequence[str] = (),
    hf_overrides: str | None = None,
    tokenizer: str | None = None,
) -> Texts:
    """Return the models' names, and a loader of their tokenizers to call while the instance starts.

    :param served_names: names of the first model in requests instead of its own; the first of
        them is the model's name elsewhere.
    :param hf_overrides: JSON object of fields that replace those of the first model's config.
    :param tokenizer: directory or hub id of the first model's tokenizer; None for its own.
    :raises ChangeSomething: if a model cannot be found, two have the same name, or the template
        cannot be used.
    """
    from kvell.models.sources.named_sources import named_sources
    from kvell.models.sources.source import resolve_model, resolve_tokenizer

    options = options or TextOptions()
    chosen = _chosen(options)
    sampling = options.generation_config
    named = named_sources(models[0], models[1:])
    if served_names:
        _check_names(served_names, [model.name for model in named[1:]])
        named = [replace(named[0], name=served_names[0]), *named[1:]]
    paths = [resolve_model(model.source, cache_dir, progress) for model in named]
    text_path = None if tokenizer is None else resolve_tokenizer(tokenizer, cache_dir, progress)

    def load() -> LoadedTexts:
        # Imported here, while instances start: the import of tokenizers is slow.
        from kvell.device.available import give_back_freed, process_bytes
        from kvell.models.text.chat_template import ChosenTemplate

        floor_bytes = process_bytes()
        own = ChosenTemplate(special_tokens_in_text=options.special_tokens_in_text)
        (name, path), *beside = zip([model.name for model in named], paths, strict=True)
        read = [
            ServedText.load(name, path, sampling, chosen or own, hf_overrides, text_path),
            *(ServedText.load(*model, sampling, own) for model in beside),
        ]
        give_back_freed()
        return LoadedTexts(read, floor_bytes)

    return Texts([model.name for model in named], load, paths)


def _check_names(served: Sequence[str], others: Sequence[str]) -> None:
    for name in served:
        if not name:
            raise ChangeSomething(
                "served_model_name", name, "is not a name", "give one, or no flag"
            )
        if name in others or served.count(name) > 1:
            problem, remedy = "is the name of two models", "give each name once"
            raise ChangeSomething("served_model_name", name, problem, remedy)


def _chosen(options: TextOptions) -> "ChosenTemplate | None":
    """Return the user's choice of the first model's template; None if there is none."""
    template, content_format = options.chat_template, options.chat_template_content_format
    if template is None and content_format == "auto":
        return None
    # Imported here: most starts need it only later, while the instance starts.
    from kvell.models.text.chat_template import chosen_template

    return chosen_template(template, content_format, options.special_tokens_in_text)


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
        from kvell.engine.running.moved_images import to_sent

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

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens, after)

    def token_offsets(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> TokenOffsets:
        """Return the offsets of a new answer's tokens; the prompt is ``after``."""
        return token_offsets(self._tokenizer, skip_special_tokens=skip_special_tokens, after=after)
