"""Settings of an engine and its models, which define what an instance serves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvell.engine.setup.options import EngineOptions
from kvell.flags import setting, settings_with_flag
from kvell.models.config.kv_dtypes import KV_DTYPES
from kvell.models.config.quantization import QUANTIZATIONS
from kvell.vocabulary import GIB

USUAL_DRAFT_TOKENS = 4
"""The draft tokens per step of a draft model that is given without their number."""
LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True)
class EngineSettings(EngineOptions):
    """Settings of an engine and its models; None means that Kvell decides.

    All fields are arguments of :class:`kvell.LLM` and :class:`kvell.AsyncEngine`.
    """

    model: str
    """``smollm2``, a transformers directory, a GGUF file, or a hub id. Requests use this name, or
    NAME if it is written ``NAME=…``."""
    beside: Sequence[str] = ()
    """Further independent models, written like ``model``. All models share the steps and the KV
    pool, which is divided by load."""
    tokenizer: str | None = setting(
        None,
        "--tokenizer",
        "The first model's tokenizer, named like a model. [default: the model's own]",
        metavar="MODEL",
    )
    """Directory or hub id of the first model's tokenizer; None for the model's own."""
    load_format: str = setting(
        "auto",
        "--load-format",
        "auto reads safetensors files; dummy makes random weights from config.json.",
        choices=LOAD_FORMATS,
    )
    """Source of the weights: ``auto`` or ``safetensors`` read files, ``dummy`` makes random weights
    for the config, to measure speed and memory of a model that is not here."""
    dtype: str = setting(
        "auto",
        "--dtype",
        "Dtype of weights, and of KV unless given; auto is bfloat16.",
        choices=("auto", "float32", "bfloat16"),
    )
    """Dtype of weights and activations: ``float32``, ``bfloat16``, or ``auto`` for bfloat16."""
    kv_cache_dtype: str = setting(
        "auto",
        "--kv-cache-dtype",
        "Dtype of KV; auto is --dtype, fp8 and int8 have a scale per token and head.",
        choices=("auto", *KV_DTYPES),
    )
    """Dtype of stored keys and values: ``auto`` (as ``dtype``), ``float32``, ``bfloat16``, ``fp8``
    or ``int8``."""
    quantization: str = setting(
        "none",
        "--quantization",
        "Storage of weights; int4 blocks in a model's files are served as they are.",
        choices=QUANTIZATIONS,
    )
    """Storage of weights: ``none`` (as ``dtype``), ``int8`` or ``int4``, for models with a fused
    pass. int4 blocks in a model's files are served as they are; a draft model keeps its dtype."""
    hf_overrides: str | Mapping[str, object] | None = setting(
        None,
        "--hf-overrides",
        "Fields in place of those of the model's config.json, as a JSON object.",
        metavar="JSON",
    )
    """Fields that replace those of the model's ``config.json``, as a mapping or a JSON object:
    ``{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}``. Fields of nested configs
    (``text_config``) are merged; other fields are replaced as a whole. Draft models and further
    models are not affected."""
    kv_budget: str | None = setting(
        None,
        "--kv-budget",
        "Tokens of a long prompt that a layer of full attention keeps, or keeps on average.",
        metavar="N|pyramid:N",
    )
    """Tokens of a computed long prompt that each layer of full attention keeps (``"1024"``), or
    keeps on average, lower layers more (``"pyramid:1024"``). None keeps all. Answers change;
    prompts beyond the budget share no prefix."""
    device: str = setting("cpu", "--device", "Where the model runs.", choices=("cpu", "cuda"))
    """The device: ``cpu`` or ``cuda``."""
    threads: int | None = setting(
        None,
        "--threads",
        "Threads of a step, which keep their processors even if other programs need them. "
        "[default: one for each processor; they yield]",
        "integer",
    )
    """Threads of a step, for models with a fused pass. None: one for each processor; if other
    programs use these, the threads yield to them. A number: always this number, and they never
    yield."""
    speculative_model: str | None = setting(
        None,
        "--speculative-model",
        "A smaller model that proposes draft tokens, 4 unless --num-speculative-tokens says "
        "otherwise. [default: look up repeated text]",
        metavar="MODEL",
    )
    """A smaller draft model with the same vocabulary, named like ``model``; its keys and values are
    in the same pool. Without it, draft tokens are the tokens after an earlier occurrence of the
    last ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens."""
    enforce_eager: bool = setting(
        False,
        "--enforce-eager",
        "Run transformers' own code layer by layer, even if the model has a fused pass.",
        "switch",
    )
    """Run transformers' code layer by layer even if the model has a fused pass (dense models and
    Falcon-H1, in float32 or bfloat16 on a CPU); slower, but as exact."""

    weight_cache: bool = setting(
        True,
        "--weight-cache",
        "Keep packed weights in files of the cache directory, which later starts read.",
        "switch",
    )
    """Keep the packed weights of models with a fused pass in the cache directory; later starts copy
    them instead of reading and packing the model's files."""
    weight_cache_size_bytes: int = setting(
        20 * GIB,
        "--weight-cache-size",
        "Bound of these files; the least recently used are removed.",
        "bytes",
        typed="20GiB",
    )
    """Bound of the files of packed weights; the least recently used are removed first, and a larger
    model has none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "beside", tuple(self.beside))
        if self.speculative_model is not None and not self.num_speculative_tokens:
            object.__setattr__(self, "num_speculative_tokens", USUAL_DRAFT_TOKENS)
        if isinstance(self.hf_overrides, Mapping):
            object.__setattr__(self, "hf_overrides", json.dumps(dict(self.hf_overrides)))

    @property
    def overrides_json(self) -> str | None:
        """``hf_overrides`` as a JSON object."""
        assert isinstance(self.hf_overrides, str | None), "a mapping was written as text"
        return self.hf_overrides

    def flags(self) -> list[str]:
        """Return command-line flags for these settings."""
        words = [word for model in (self.model, *self.beside) for word in ("--model", model)]
        for field, flag in settings_with_flag(EngineSettings):
            value = getattr(self, field.name)
            if value is None:
                continue
            if flag.kind == "switch":
                words.append(flag.name if value else flag.opposite)
            else:
                words += [flag.name, str(value)]
        return words
