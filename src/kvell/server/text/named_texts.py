"""The lookup of the models that a front serves; their tokenizers are loaded later."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvell.engine.sampling.model_defaults import GenerationConfig
from kvell.errors import ChangeSomething
from kvell.models.sources.progress import Progress
from kvell.server.text.text_model import LoadedTexts, Texts

if TYPE_CHECKING:
    from kvell.models.text.chat_template import ChosenTemplate
    from kvell.models.text.content_format import ContentFormat


def texts_of(
    models: Sequence[str],
    cache_dir: Path,
    progress: Progress,
    *,
    served_names: Sequence[str] = (),
    generation_config: GenerationConfig = "auto",
    chat_template: str | None = None,
    chat_template_content_format: "ContentFormat" = "auto",
    hf_overrides: str | None = None,
    tokenizer: str | None = None,
) -> Texts:
    """Return the models' names, and a loader of their tokenizers to call while the instance starts.

    :param served_names: names of the first model in requests instead of its own; the first of
        them is the model's name elsewhere.
    :param generation_config: whether the models' recommended sampling is their default.
    :param chat_template: the first model's template, as a file or as text; None for its own.
    :param chat_template_content_format: form in which that template gets content.
    :param hf_overrides: JSON object of fields that replace those of the first model's config.
    :param tokenizer: directory or hub id of the first model's tokenizer; None for its own.
    :raises ChangeSomething: if a model cannot be found, two have the same name, or the template
        cannot be used.
    """
    from kvell.models.sources.named_sources import named_sources
    from kvell.models.sources.source import resolve_model, resolve_tokenizer

    chosen = _chosen(chat_template, chat_template_content_format)
    named = named_sources(models[0], models[1:])
    if served_names:
        _check_names(served_names, [model.name for model in named[1:]])
        named = [replace(named[0], name=served_names[0]), *named[1:]]
    paths = [resolve_model(model.source, cache_dir, progress) for model in named]
    text_path = None if tokenizer is None else resolve_tokenizer(tokenizer, cache_dir, progress)

    def load() -> LoadedTexts:
        # Imported here, while instances start: the import of tokenizers is slow.
        from kvell.device.process_size import give_back_freed, process_bytes
        from kvell.server.text.served_text import ServedText

        floor_bytes = process_bytes()
        (name, path), *beside = zip([model.name for model in named], paths, strict=True)
        read = [
            ServedText.load(name, path, generation_config, chosen, hf_overrides, text_path),
            *(ServedText.load(*model, generation_config) for model in beside),
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


def _chosen(template: str | None, content_format: "ContentFormat") -> "ChosenTemplate | None":
    """Return the user's choice of the first model's template; None if there is none."""
    if template is None and content_format == "auto":
        return None
    # Imported here: most starts need it only later, while the instance starts.
    from kvell.models.text.chat_template import chosen_template

    return chosen_template(template, content_format)
