"""Finds the models that a front serves, and reads their tokenizers later."""

from collections.abc import Sequence
from pathlib import Path

from kvell.engine.sampling.model_defaults import GenerationConfig
from kvell.models.sources.progress import Progress
from kvell.server.text.text_model import LoadedTexts, Texts


def texts_of(
    models: Sequence[str],
    cache_dir: Path,
    progress: Progress,
    generation_config: GenerationConfig = "auto",
) -> Texts:
    """Return the models' names, and a loader of their tokenizers to call while the instance starts.

    :param generation_config: whether the models' recommended sampling is their default.
    :raises ChangeSomething: if a model cannot be found, or two have the same name.
    """
    from kvell.models.sources.named_sources import named_sources
    from kvell.models.sources.source import resolve_model

    named = named_sources(models[0], models[1:])
    paths = [resolve_model(one.source, cache_dir, progress) for one in named]

    def load() -> LoadedTexts:
        # Imported here, while instances start: tokenizers take long to import.
        from kvell.device.process_size import give_back_freed, process_bytes
        from kvell.server.text.served_text import ServedText

        floor_bytes = process_bytes()
        read = [
            ServedText.load(one.name, path, generation_config)
            for one, path in zip(named, paths, strict=True)
        ]
        give_back_freed()
        return LoadedTexts(read, floor_bytes)

    return Texts([one.name for one in named], load)
