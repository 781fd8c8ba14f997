"""Settings that are given as keyword arguments of a class."""

from pathlib import Path
from typing import Any

import pytest

from kvell.engine.setup.arguments.settings_from import settings_from
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething


class Owner:
    """A class with a parameter of its own."""

    def __init__(self, model: str, *, cache_dir: Path | None = None, **settings: object) -> None:
        pass


def settings(**arguments: object) -> EngineSettings:
    return settings_from(Owner, "m", arguments)


def test_sizes_are_texts_or_numbers_of_bytes() -> None:
    expected = EngineSettings(
        "m", kv_memory_bytes=256 << 20, memory_bytes=2 * 10**9, cpu_buffer_bytes=4096
    )
    assert settings(kv_memory="256MiB", memory="2GB", cpu_buffer=4096) == expected
    assert settings(kv_memory=None, kv_memory_bytes=7) == EngineSettings("m", kv_memory_bytes=7)


def test_models_and_overrides_have_several_forms() -> None:
    chosen = settings_from(Owner, Path("/m"), {"hf_overrides": {"a": 1}, "beside": ["b"]})
    assert chosen == EngineSettings("/m", hf_overrides='{"a": 1}', beside=("b",))
    assert settings_from(Owner, chosen, {}) is chosen


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("kv_memory_byte", "kv_memory_bytes"),
        ("kv_memry", "kv_memory"),
        ("cachedir", "cache_dir"),
        ("max_model_length", "max_model_len"),
    ],
)
def test_an_unknown_argument_names_the_class_and_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError) as caught:
        settings(**{name: 1})
    expected = f"{name}=1: is not an argument of Owner; did you mean {nearest}?"
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["colour", "parallelism", "settings"])
def test_an_unknown_argument_without_a_near_one_names_none(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        settings(**{name: 1})
    assert str(caught.value) == f"{name}=1: is not an argument of Owner; leave it out"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kv_memory": "much"}, "kv_memory=much: is not a size; write it like 512MiB or 24GB"),
        ({"kv_memory": 1.5}, 'kv_memory=1.5: .*; give one, or kv_memory="512MiB"'),
        ({"kv_memory_bytes": "abc"}, 'kv_memory_bytes=abc: .*; give one, or kv_memory="512MiB"'),
        ({"kv_memory": "1MiB", "kv_memory_bytes": 1}, "kv_memory=1MiB: is given as kv_memory_byt"),
        ({"max_model_len": "long"}, "max_model_len=long: is not a whole number from 1; give one"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: is not a whole number from 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True: is not a whole number from 1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1: is not a whole number from 0"),
        ({"slo_ttft_seconds": float("nan")}, "slo_ttft_seconds=nan: is not a number of seconds"),
        ({"dtype": "float16"}, "dtype=float16: is not served; use bfloat16, which has the same"),
        ({"dtype": "int3"}, "dtype=int3: is not served; use one of auto, float32, bfloat16"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: is not a number above 0"),
        ({"num_gpu_blocks_override": 9}, 'num_gpu_blocks_override=9: .*use kv_memory="4GiB"'),
        ({"tensor_parallel_size": 4}, r'.*use AsyncEngine\(instances="mixed=2"\) for two copies'),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: Kvell has no tensor parallelism"),
        ({"data_parallel_size": 2}, "data_parallel_size=2: needs --instances, which Owner does"),
        ({"enable_lora": True}, "enable_lora=True: Kvell serves no adapters; merge"),
        ({"speculative_config": {"method": "eagle"}}, "speculative_config=.*eagle.*: is not serve"),
        ({"enforce_eager": "yes"}, "enforce_eager=yes: is not a bool; use True or False"),
        ({"kv_budget": 1024}, "kv_budget=1024: is not a text"),
        ({"beside": "m"}, r"beside=m: is not a list of models; write it like \[.smollm2.\]"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ChangeSomething, match=f"^{text}"):
        settings(**arguments)


@pytest.mark.parametrize("model", ["", 7, None])
def test_a_model_is_a_name(model: Any) -> None:
    with pytest.raises(ChangeSomething, match=f"model={model}: is not the name of a model"):
        settings_from(Owner, model, {})


def test_none_is_the_default() -> None:
    names = (
        "max_num_seqs",
        "quantization",
        "dtype",
        "revision",
        "mm_processor_kwargs",
        "swap_space",
    )
    assert settings(**dict.fromkeys(names)) == EngineSettings("m")
    with pytest.raises(TypeError, match="frobnicate"):
        settings(frobnicate=None)


def test_mappings_are_json_of_other_systems() -> None:
    draft = {"method": "ngram", "num_speculative_tokens": 3}
    made = settings(
        speculative_config=draft,
        structured_outputs_config={"backend": "xgrammar"},
        compilation_config={"level": 3},
        limit_mm_per_prompt={"image": 2},
        mm_processor_kwargs={},
    )
    assert made == EngineSettings("m", num_speculative_tokens=3)
    with pytest.raises(ChangeSomething, match=r"structured_outputs_config=.*: is not served"):
        settings(structured_outputs_config={"backend": "outlines"})


def test_an_object_with_all_settings_takes_no_others() -> None:
    with pytest.raises(ChangeSomething, match="dtype=float32: is given next to an object"):
        settings_from(Owner, EngineSettings("m"), {"dtype": "float32"})


def test_arguments_of_other_systems_are_translated(caplog: pytest.LogCaptureFixture) -> None:
    chosen = settings(
        tensor_parallel_size=1,
        trust_remote_code=True,
        enable_lora=False,
        swap_space=4,
        dtype="float",
        context_length=512,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    assert chosen == EngineSettings(
        "m",
        cpu_buffer_bytes=4 << 30,
        dtype="float32",
        max_model_len=512,
        num_speculative_tokens=4,
    )
    assert caplog.messages == [
        "Owner: --tensor-parallel-size has no effect: Kvell has no tensor parallelism",
        "Owner: --trust-remote-code has no effect: Kvell never runs code of a model's repository",
    ]
