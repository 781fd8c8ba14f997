"""Model directories: what is resolved, what is loaded, what is refused in one line."""

import json
import os
import shutil
import struct
from pathlib import Path

import httpx2
import huggingface_hub.errors as hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvell.attention.choice import choose_kernels
from kvell.attention.portable import PortableKernels
from kvell.device.shared_weights import SharedWeights
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.models.config.configs import read_config
from kvell.models.config.json_files import overridden
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.random_weights import write_random_model
from kvell.models.loading.weight_files import check_weight_file, read_weight_map
from kvell.models.sources import hub as hub_client
from kvell.models.sources.source import resolve_model
from kvell.pages.layout import GroupKind
from tests.models.harness import assert_exact, oracle_logits, prompt_ids, runner_over, tiny_config
from tests.models.loading.recorder import logits_of
from tests.models.random_model import random_paged_model


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(path: Path) -> None:
    load_paged_model(path, PortableKernels())


def refused(path: Path) -> str:
    with pytest.raises(ChangeSomething) as caught:
        load(path)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_loaded_weights_compute_what_transformers_computes(saved: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager")
    ids = prompt_ids(20)
    logits = runner_over(load_paged_model(saved, PortableKernels())).step([("a", ids)])
    assert_exact(logits, oracle_logits(oracle, ids))


@pytest.mark.parametrize("size", [10, 12])
@pytest.mark.parametrize("fused", [True, False])
def test_head_sizes_that_compiled_kernels_do_not_take(
    tmp_path: Path, size: int, *, fused: bool
) -> None:
    config = tiny_config("LlamaForCausalLM", head_dim=size)
    path = write_random_model(tmp_path / "model", config, seed=5)
    model = load_paged_model(path, choose_kernels(torch.device("cpu")), fused=fused)
    assert (model.fused, model.kernels.name) == (None, "portable")
    oracle = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ids = prompt_ids(20)
    assert_exact(runner_over(model).step([("a", ids)]), oracle_logits(oracle, ids))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_fields_may_be_given_in_place_of_the_configs_own(saved: Path) -> None:
    """As model cards tell users to add YaRN; the file's theta stays."""
    overrides = json.dumps({"rope_scaling": YARN, "max_position_embeddings": 64})
    model = load_paged_model(saved, PortableKernels(), overrides=overrides)
    assert model.description.max_model_len == 256
    theta = read_config(saved).rope_parameters["rope_theta"]
    own = read_config(saved, json.dumps({"rope_parameters": YARN | {"rope_theta": theta}}))
    oracle = AutoModelForCausalLM.from_pretrained(saved, config=own, attn_implementation="eager")
    ids = prompt_ids(90)
    assert_exact(runner_over(model).step([("a", ids)]), oracle_logits(oracle, ids))


def test_nested_configs_are_merged_and_other_fields_replaced() -> None:
    raw = {"text_config": {"a": 1, "b": {"c": 1}}, "d": {"e": 1}, "f": 1}
    given: dict[str, object] = {"text_config": {"b": {"x": 2}}, "d": {"x": 2}}
    assert overridden(raw, given) == {
        "text_config": {"a": 1, "b": {"x": 2}},
        "d": {"x": 2},
        "f": 1,
    }


@pytest.mark.parametrize("text", ["{", "[1]", "", "3"])
def test_overrides_that_are_no_object(saved: Path, text: str) -> None:
    with pytest.raises(ChangeSomething, match=r"--hf-overrides.*is not a JSON object") as caught:
        load_paged_model(saved, PortableKernels(), overrides=text)
    assert caught.value.field == "--hf-overrides"


def test_overrides_reach_instances_as_text() -> None:
    settings = EngineSettings(model="m", hf_overrides={"max_position_embeddings": 64})
    words = settings.flags()
    assert words[words.index("--hf-overrides") + 1] == '{"max_position_embeddings": 64}'


def test_dtype_is_that_asked_for(saved: Path) -> None:
    model = load_paged_model(saved, PortableKernels(), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.description.layers[0].element_bytes == 2
    assert model.weight_bytes == sum(p.nbytes for p in model.module.parameters())


def test_kv_dtype_may_differ(saved: Path) -> None:
    model = load_paged_model(saved, PortableKernels(), kv_dtype=torch.bfloat16)
    assert model.description.layers[0].element_bytes == 2
    assert model.dtype == torch.float32


def test_truncated_weight_file_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused(copied)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08", struct.pack("<Q", 1 << 60), struct.pack("<Q", 8) + b"not json", b"\0" * 64],
)
def test_damaged_header_is_named(copied: Path, content: bytes) -> None:
    (copied / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refused(copied)


def test_flipped_header_bytes_are_refused(copied: Path) -> None:
    """The length still fits; the library or the check notices the rest."""
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:200] = bytes(byte ^ 0x5A for byte in data[8:200])
    file.write_bytes(bytes(data))
    assert "model" in refused(copied)


def test_intact_weight_file_passes(saved: Path) -> None:
    check_weight_file(saved / "model.safetensors")


def test_missing_tensor_is_not_filled_with_random_numbers(copied: Path) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refused(copied)


def test_tensor_of_another_shape_is_refused(copied: Path) -> None:
    raw = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(raw | {"intermediate_size": 72}))
    assert "do not load" in refused(copied)


def test_missing_weights(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(copied)


def test_missing_shard_is_named(copied: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in refused(copied)


def test_shards_are_those_of_the_index(copied: Path) -> None:
    names = ["model-1.safetensors", "model-2.safetensors"]
    save_file({"b": torch.zeros(2), "other": torch.zeros(3)}, copied / names[0])
    save_file({"a": torch.zeros(2), "c": torch.zeros(2)}, copied / names[1])
    index = {"weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = read_weight_map(copied)
    assert [file.name for file in weights.files] == names
    assert weights.map_tensors().keys() == {"a", "b", "c"}


def test_missing_config(copied: Path) -> None:
    (copied / "config.json").unlink()
    assert "holds no config.json" in refused(copied)


@pytest.mark.parametrize("content", ["{", "[1]", "", "\udcff"])
def test_config_that_is_no_json_object(copied: Path, content: str) -> None:
    (copied / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "config.json" in refused(copied)


def test_unknown_model_type_is_named(copied: Path) -> None:
    (copied / "config.json").write_text('{"model_type": "perpetuum"}')
    assert "perpetuum" in refused(copied)


def test_malformed_field(copied: Path) -> None:
    raw = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": "many"}))
    assert "num_hidden_layers" in refused(copied)


def test_refused_architecture_never_gets_to_its_weights(copied: Path) -> None:
    (copied / "config.json").write_text(
        '{"model_type": "zamba", "architectures": ["ZambaForCausalLM"]}'
    )
    (copied / "model.safetensors").unlink()
    assert "needs its own mixer" in refused(copied)


def test_the_class_that_would_run_counts_not_the_one_that_is_named(copied: Path) -> None:
    (copied / "config.json").write_text(
        '{"model_type": "zamba", "architectures": ["LlamaForCausalLM"]}'
    )
    assert "ZambaForCausalLM" in refused(copied)


def test_config_that_names_no_architecture_is_served_by_its_type(copied: Path) -> None:
    raw = json.loads((copied / "config.json").read_text())
    del raw["architectures"]
    (copied / "config.json").write_text(json.dumps(raw))
    load(copied)


def test_config_file_alone_can_be_read(saved: Path) -> None:
    assert read_config(saved / "config.json").num_hidden_layers == 3


def test_random_model_is_guarded_too() -> None:
    from transformers import ZambaConfig

    config = ZambaConfig(vocab_size=64)
    with pytest.raises(ChangeSomething, match="needs its own mixer"):
        random_paged_model(config, PortableKernels())


def unreachable(model: str) -> Path:
    raise AssertionError(f"{model} must not be fetched")


def test_a_directory_is_taken_as_it_is(saved: Path, tmp_path: Path) -> None:
    assert resolve_model(str(saved), tmp_path, fetch=unreachable) == saved


@pytest.mark.parametrize("model", ["/no/such/model", "./nothing", "~/nothing-here", "a/b/c", ""])
def test_paths_that_do_not_exist_are_not_looked_up(model: str, tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething, match="no such directory"):
        resolve_model(model, tmp_path, fetch=unreachable)


def test_a_file_is_no_model(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething, match="is a file"):
        resolve_model(str(saved / "config.json"), tmp_path, fetch=unreachable)


@pytest.mark.parametrize("model", ["gpt9", "someone/something"])
def test_hub_ids_are_fetched(model: str, tmp_path: Path) -> None:
    asked: list[str] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return tmp_path

    assert resolve_model(model, tmp_path, fetch=fetch) == tmp_path
    assert asked == [model]


RESPONSE = httpx2.Response(404, request=httpx2.Request("GET", "http://localhost"))


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (hub.HFValidationError("bad id"), "neither a directory nor a model"),
        (hub.RepositoryNotFoundError("404", response=RESPONSE), "neither a directory nor a model"),
        (hub.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (hub.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (httpx2.ConnectError("no route"), "cannot be reached"),
        (hub.GatedRepoError("ask for access", response=RESPONSE), "is gated"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_trouble_with_the_hub_is_one_clear_line(
    error: Exception, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_named: object) -> str:
        raise error

    monkeypatch.setattr(hub_client, "snapshot_download", fail)
    with pytest.raises(ChangeSomething, match=problem) as caught:
        hub_client.fetch_from_hub("someone/something")
    assert "\n" not in str(caught.value)
    assert caught.value.value == "someone/something"


def test_a_config_that_transformers_makes_no_model_of(copied: Path) -> None:
    """Ministral's code wants a head size where its config may leave it out."""
    raw = json.loads((copied / "config.json").read_text())
    raw |= {"model_type": "ministral", "architectures": ["MinistralForCausalLM"], "head_dim": None}
    (copied / "config.json").write_text(json.dumps(raw))
    assert "do not load (unsupported operand" in refused(copied)


def test_a_budget_of_kept_tokens_is_for_layers_of_full_attention(saved: Path) -> None:
    layers = load_paged_model(saved, PortableKernels(), kv_budget="24").description.layers
    assert {(layer.kind, layer.window_tokens) for layer in layers} == {(GroupKind.DROPPING, 24)}


def test_a_budget_that_is_none_is_refused_before_weights_are_read(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(ChangeSomething, match="--kv-budget=all: is not a budget"):
        load_paged_model(copied, PortableKernels(), kv_budget="all")


CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_config("LlamaForCausalLM").save_pretrained(tmp_path)
    return tmp_path


def test_a_config_is_enough(directory: Path) -> None:
    model = load_paged_model(directory, choose_kernels(CPU), is_dummy=True)
    assert [file.name for file in directory.glob("*.safetensors")] == []
    assert bool(logits_of(model).isfinite().all())
    assert model.weight_bytes > 0


def test_without_it_the_missing_files_are_an_error(directory: Path) -> None:
    with pytest.raises(ChangeSomething, match="safetensors"):
        load_paged_model(directory, choose_kernels(CPU))


def test_instances_share_the_same_weights(directory: Path) -> None:
    descriptor = os.memfd_create("weights")
    try:
        shared = SharedWeights(descriptor)
        several = [
            load_paged_model(directory, choose_kernels(CPU), is_dummy=True, shared=shared)
            for _ in range(2)
        ]
        assert torch.equal(*map(logits_of, several))
        assert len(shared.entries()) == 1
        del several
    finally:
        os.close(descriptor)
