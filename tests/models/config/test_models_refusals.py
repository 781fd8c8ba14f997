"""Every model type that transformers can make text with: served, or refused by class and need.

Each goes the way that ``generate`` and ``serve`` take before any weights are read, from a
``config.json`` that says nothing but its type.
"""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething
from kvell.models.config.configs import config_from_dict
from kvell.models.config.description import describe
from kvell.models.families.families import (
    AUDIO,
    CROSS,
    EXACT,
    IMAGES,
    INDEX,
    MIXER_KINDS,
    RECURRENT,
    UNKNOWN,
    WITH_IMAGES,
)
from kvell.models.families.quantised_schemes import scheme_of
from kvell.models.families.refusals import (
    ENCODED,
    TEXT,
    WRITES_NOTHING,
    check_architecture,
    class_run,
    find_needed,
    tables_of,
)
from kvell.models.loading.loading import check_model
from kvell.models.paged_model import PagedModel
from kvell.models.states.mixer_slots import place_mixers
from tests.models.cases import MECHANISMS, long_unless, some_fast
from tests.models.harness import STATES, tiny_config

GENERATING = sorted({name for table in (*TEXT, *ENCODED) for name in getattr(modeling_auto, table)})
MUSIC: dict[str, Any] = {
    "text_encoder": {"model_type": "t5"},
    "audio_encoder": {"model_type": "encodec"},
    "decoder": {"model_type": "musicgen_decoder"},
}
PARTS: dict[str, dict[str, Any]] = {
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "gpt2"},
    },
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2"},
        "decoder": {"model_type": "gpt2"},
    },
    "encoder-decoder": {"encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert"}},
    "musicgen": MUSIC,
    "musicgen_melody": MUSIC,
}
"""Types that are made of others, and are nothing without naming them."""
COMPLETED: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 128},
}
"""Without these fields transformers makes a config, but no model of it."""
NEEDS = (AUDIO, CROSS, IMAGES, INDEX, RECURRENT, UNKNOWN)


def raw_config(model_type: str) -> dict[str, Any]:
    """What a config.json holds; transformers changes what it is given."""
    return copy.deepcopy({"model_type": model_type, **PARTS.get(model_type, {})})


@cache
def refusal_of(model_type: str, *architectures: str) -> ChangeSomething | None:
    raw = raw_config(model_type)
    if architectures:
        raw["architectures"] = list(architectures)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(raw))
        try:
            check_model(path)
        except ChangeSomething as refusal:
            return refusal
    return None


def own_class(model_type: str) -> str:
    return class_run(config_from_dict(raw_config(model_type)))


def may_be_served(model_type: str) -> bool:
    """Whether transformers names one of our classes for a type; a config would cost more."""
    tables = tables_of((*TEXT, *ENCODED))
    classes = {str(table[model_type]) for table in tables if model_type in table}
    return any(name in found for name in EXACT | WITH_IMAGES.keys() for found in classes)


SERVED = [name for name in GENERATING if may_be_served(name) and refusal_of(name) is None]


def test_there_are_as_many_as_transformers_has() -> None:
    assert len(GENERATING) > 250
    assert len(SERVED) == len(EXACT | WITH_IMAGES.keys())


@pytest.mark.parametrize("model_type", some_fast(GENERATING, {*GENERATING[::8], *SERVED[::4]}))
def test_served_or_refused_by_class_and_need(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        with pytest.raises(ChangeSomething, match="unknown model type"):
            config_from_dict({"model_type": model_type})
        return
    refusal = refusal_of(model_type)
    if refusal is None:
        assert own_class(model_type) in EXACT | WITH_IMAGES.keys()
        return
    assert (refusal.field, refusal.value) == ("model", own_class(model_type))
    assert hasattr(transformers, str(refusal.value))
    assert "needs" in refusal.problem
    assert refusal.problem.startswith((*NEEDS, "needs a policy for layers of type"))
    assert refusal.remedy
    assert "\n" not in str(refusal)


def test_all_that_is_listed_as_exact_is_served_by_its_type_alone() -> None:
    assert {own_class(model_type) for model_type in SERVED} == EXACT | WITH_IMAGES.keys()


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=long_unless(own_class(name) in MECHANISMS.values()))
        for name in SERVED
        if own_class(name) in EXACT
    ],
)
def test_what_is_served_stands_over_pages(model_type: str) -> None:
    """At the size of transformers' defaults, on the meta device: every layer finds its mixer."""
    config = config_from_dict({"model_type": model_type, **COMPLETED.get(model_type, {})})
    with torch.device("meta"):
        module = getattr(transformers, own_class(model_type))._from_config(config)
    model = PagedModel(module, describe(config, 4), PortableKernels())
    assert model.description.layers


@pytest.mark.parametrize(
    "model_type", ["inkling_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zaya"]
)
def test_recurrent_families_without_a_mixer(model_type: str) -> None:
    refusal = refusal_of(model_type)
    assert refusal is not None
    assert refusal.problem == RECURRENT


@pytest.mark.parametrize("name", sorted(STATES))
def test_a_family_that_lost_its_mixer_is_refused(name: str) -> None:
    """By the class of the module that nothing stands in for."""
    config = tiny_config(name)
    with torch.device("meta"):
        module = getattr(transformers, name)._from_config(config)
    own = {type(child).__name__ for child in module.modules()} & MIXER_KINDS.keys()
    assert len(own) == 1
    others = {kind: mixer for kind, mixer in MIXER_KINDS.items() if kind not in own}
    with pytest.raises(ChangeSomething) as caught:
        place_mixers(module, describe(config, 4), others)
    assert caught.value.field == "model"
    assert name in str(caught.value)


@pytest.mark.parametrize("model_type", ["bloom", "deepseek_v32", "llava", "t5", "zamba"])
def test_a_name_does_not_help(model_type: str) -> None:
    refusal = refusal_of(model_type, "LlamaForCausalLM")
    assert refusal is not None
    assert refusal.value == own_class(model_type)


def test_a_class_of_somebody_elses_is_refused_by_its_name() -> None:
    """A model type that is served, with code that came with the weights."""
    refusal = refusal_of("llama", "MyLlamaForCausalLM")
    assert refusal is not None
    assert (refusal.value, refusal.problem) == ("MyLlamaForCausalLM", UNKNOWN)


def test_an_unknown_type_is_refused_with_the_class_that_it_wants() -> None:
    raw = {"model_type": "hymba", "architectures": ["HymbaForCausalLM"]}
    with pytest.raises(ChangeSomething, match="'hymba', to be run by HymbaForCausalLM"):
        config_from_dict(raw)


@pytest.mark.parametrize("error", [ImportError("requires timm"), OSError("no way to the hub")])
def test_configs_that_want_what_is_not_there(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(transformers.LlamaConfig, "from_dict", fail)
    with pytest.raises(ChangeSomething, match=str(error)) as caught:
        config_from_dict({"model_type": "llama"}, "here")
    assert caught.value.value == "here"


@pytest.mark.parametrize("method", ["bitsandbytes", "fbgemm_fp8", "hqq"])
def test_quantisers_that_are_not_read_are_refused_by_name(method: str) -> None:
    config = tiny_config("LlamaForCausalLM", quantization_config={"quant_method": method})
    with pytest.raises(ChangeSomething, match=f"quantised \\({method}\\): it needs") as caught:
        check_architecture(config)
    assert caught.value.value == "LlamaForCausalLM"


@pytest.mark.parametrize("method", ["awq", "fp8", "gptq", "mxfp4"])
def test_quantisers_that_are_read_pass(method: str) -> None:
    check_architecture(
        tiny_config("LlamaForCausalLM", quantization_config={"quant_method": method})
    )


def test_a_quantiser_may_be_an_object_and_plain_weights_have_none() -> None:
    config = SimpleNamespace(model_type="llama", quantization_config=SimpleNamespace(bits=4))
    with pytest.raises(ChangeSomething, match=r"quantised \(unknown\)"):
        scheme_of(config, "LlamaForCausalLM")
    assert scheme_of(tiny_config("LlamaForCausalLM"), "") is None
    assert scheme_of(SimpleNamespace(model_type="llama", quantization_config=None), "") is None


TEXT_FIELDS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}


def text(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type="llama", **(TEXT_FIELDS | fields))


@pytest.mark.parametrize(
    ("config", "need"),
    [
        (SimpleNamespace(model_type="vit"), WRITES_NOTHING),
        (text(), UNKNOWN),
        (text(is_encoder_decoder=True), CROSS),
        (text(cross_attention_layers=[1]), CROSS),
        (text(vision_config={}), IMAGES),
        (text(audio_config={}), AUDIO),
        (text(audio_config={}, vision_config={}), IMAGES),
        (text(index_head_dim=64), INDEX),
        (text(layer_types=["full_attention", "indexed_attention"]), INDEX),
        (text(layer_types=["attention", "ring_attention"]), "of type 'ring_attention'"),
        (text(layer_types=["full_attention", "recurrent"]), RECURRENT),
        (text(layers_block_type=["mamba", "attention"]), RECURRENT),
    ],
)
def test_what_a_config_would_need(config: Any, need: str) -> None:
    assert need in find_needed(config)


def test_a_type_that_is_text_and_more_is_run_as_what_it_is() -> None:
    """Some types have a class of text alone, too; a config with images runs the whole."""
    assert any("mllama" in table for table in tables_of(TEXT))
    assert own_class("mllama") == "MllamaForConditionalGeneration"
    assert class_run(SimpleNamespace(model_type="mllama")) == "MllamaForCausalLM"


@pytest.mark.parametrize(
    ("model_type", "need"),
    [
        ("bart", CROSS),
        ("deepseek_v32", INDEX),
        ("gemma3", IMAGES),
        ("gemma3n", IMAGES),
        ("idefics3", IMAGES),
        ("llama4", IMAGES),
        ("llava", IMAGES),
        ("llava_next", IMAGES),
        ("mistral3", IMAGES),
        ("mllama_text_model", CROSS),
        ("qwen3_vl", IMAGES),
        ("qwen3_vl_moe", IMAGES),
        ("qwen3_5", IMAGES),
        ("qwen3_5_moe", IMAGES),
        ("smolvlm", IMAGES),
        ("t5", CROSS),
        ("whisper", CROSS),
    ],
)
def test_families_that_were_examined_need_what_was_missing(model_type: str, need: str) -> None:
    assert find_needed(config_from_dict(raw_config(model_type))) == need
