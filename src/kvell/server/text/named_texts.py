"""The lookup of the models that a front serves; their tokenizers are loaded later."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from kvell.engine.sampling.model_defaults import GenerationConfig
from kvell.errors import ChangeSomething
from kvell.flags import setting
from kvell.models.sources.progress import Progress
from kvell.models.text.chat_template import ChosenTemplate, ContentFormat
from kvell.models.text.rendering.control_tokens import SpecialTokensInText
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
    from kvell.models.sources.source import resolve_as, resolve_model

    options = options or TextOptions()
    chosen = _chosen(options)
    sampling = options.generation_config
    named = named_sources(models[0], models[1:])
    if served_names:
        _check_names(served_names, [model.name for model in named[1:]])
        named = [replace(named[0], name=served_names[0]), *named[1:]]
    paths = [resolve_model(model.source, cache_dir, progress) for model in named]
    texts = None if tokenizer is None else resolve_as("tokenizer", tokenizer, cache_dir, progress)

    def load() -> LoadedTexts:
        # Imported here, while instances start: the import of tokenizers is slow.
        from kvell.device.available import give_back_freed, process_bytes
        from kvell.models.text.chat_template import ChosenTemplate
        from kvell.server.text.served_text import ServedText

        floor_bytes = process_bytes()
        own = ChosenTemplate(special_tokens_in_text=options.special_tokens_in_text)
        (name, path), *beside = zip([model.name for model in named], paths, strict=True)
        read = [
            ServedText.load(name, path, sampling, chosen or own, hf_overrides, texts),
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
