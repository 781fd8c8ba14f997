"""The class that a config would run, and the features it would need, from the config alone.

``families`` lists the classes that were examined; this is for all others, so that every refusal
names a class of transformers and a missing feature. The rule alone decides; no list repeats it.
"""

from collections.abc import Mapping
from typing import Any

from kvell.models.config.config_fields import architecture, optional_size, text_config
from kvell.models.config.layer_kinds import LAYER_KINDS
from kvell.models.config.multimodal import ENCODERS, images_in_text, is_encoder_decoder
from kvell.models.config.state_sizes import is_recurrent
from kvell.models.families.families import (
    AUDIO,
    CROSS,
    IMAGES,
    INDEX,
    OWN_TEXT,
    RECURRENT,
    UNKNOWN,
    WITH_IMAGES,
    listed_class,
    require_exact,
)
from kvell.models.families.quantised_schemes import scheme_of
from kvell.pages.layout import GroupKind

TEXT = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)
ENCODED = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
"""transformers' tables from model type to class: ``TEXT`` alone, ``ENCODED`` with an encoder."""
OTHER = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
)
"""Tables of classes that generate no text."""
WRITES_NOTHING = "generates no text: it needs a language model's head"


def class_run(config: Any) -> str:
    """Return the class of transformers for a config as a whole; its model type if there is none.

    A config with an encoder gets a class with one, even if its model type also has a class of text
    alone.
    """
    model_type = str(getattr(config, "model_type", None) or "unknown")
    writing = (*ENCODED, *TEXT) if _has_encoder(config) else (*TEXT, *ENCODED)
    return _first_class(model_type, (*writing, *OTHER)) or model_type


def find_needed(config: Any) -> str:
    text = _text(config)
    if getattr(text, "cross_attention_layers", None):
        return CROSS
    if not _first_class(str(getattr(config, "model_type", "")), (*TEXT, *ENCODED)):
        return WRITES_NOTHING
    if not images_in_text(config, text):
        return CROSS
    if _has_encoder(config):
        return IMAGES if not _is_audio_only(config) else AUDIO
    if optional_size(text, ("index_head_dim",)) or "indexed_attention" in _types(text):
        return INDEX
    unknown = sorted(_types(text) - LAYER_KINDS.keys() - {"attention"})
    if unknown:
        return f"needs a policy for layers of type {unknown[0]!r}"
    recurring = {kind for kind, stores in LAYER_KINDS.items() if GroupKind.STATE in stores}
    if is_recurrent(text) or _types(text) & recurring:
        return RECURRENT
    return UNKNOWN


def check_architecture(config: Any) -> None:
    """Raise unless the class that transformers would run for a config is known to be exact.

    The class follows from the model type and the config's parts, whatever the config names.

    :raises ChangeSomething: naming the class and the missing feature; also for weights of a
        quantisation that is not read.
    """
    if (name := listed_class(config)) is not None:
        scheme_of(config, name)
        return
    need = find_needed(config)
    if getattr(config, "architectures", None) and not is_body(config):
        require_exact(architecture(config), need)
    require_exact(class_run(config), need)
    if WITH_IMAGES.get(class_run(config), "cross") not in OWN_TEXT:
        text = text_config(config)
        require_exact(class_run(text), find_needed(text))
    scheme_of(config, class_run(config))


def is_body(config: object) -> bool:
    """Return whether a config names the body of a text model, without a head (``Qwen3Model``)."""
    model_type = str(getattr(config, "model_type", None))
    body = tables_of(OTHER)[0].get(model_type)
    return architecture(config) == body and class_run(config) not in WITH_IMAGES


def _is_audio_only(config: Any) -> bool:
    seen = any("vis" in field or "image" in field for field in vars(config))
    return not seen and any(field.startswith("audio") for field in vars(config))


def _has_encoder(config: Any) -> bool:
    text = _text(config)
    encoders = any(getattr(config, field, None) is not None for field in ENCODERS)
    return text is not config or encoders or is_encoder_decoder(config, text)


def _text(config: Any) -> Any:
    """Return the text's part; the whole config if transformers itself cannot identify that part."""
    try:
        return text_config(config)
    except ValueError:
        return config


def _types(text: Any) -> set[str]:
    named = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return {str(kind) for kind in named}


def _first_class(model_type: str, names: tuple[str, ...]) -> str:
    """Return the (first) class of a model type in the first table that has it; "" if none has."""
    named = next((table[model_type] for table in tables_of(names) if model_type in table), "")
    return str(named if isinstance(named, str) else named[0])


def tables_of(names: tuple[str, ...]) -> list[Mapping[str, Any]]:
    # Imported here: transformers' tables of all models import slowly.
    from transformers.models.auto import modeling_auto

    return [getattr(modeling_auto, name) for name in names]
