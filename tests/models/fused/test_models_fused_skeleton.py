"""Models read from their files alone: the same recipes as transformers' own modules give."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from kvell.attention.interface import AttentionKernels
from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething
from kvell.models.config.description import describe
from kvell.models.config.json_files import CONFIG_FILE
from kvell.models.families.families import FUSED, fused_class
from kvell.models.families.plain_config import NEEDED, UNUSUAL, plain_config
from kvell.models.families.refusals import class_run
from kvell.models.fused.recipe import recipe_of
from kvell.models.fused.skeleton import DecoderSkeleton, skeleton_of
from kvell.models.loading.loading import describe_as, load_paged_model
from kvell.models.loading.weight_files import SINGLE_FILE, read_weight_map
from kvell.models.loading.weights import load_module
from tests.models.cases import MECHANISMS, covering, families, long_unless
from tests.models.fused_models import fused_model, native
from tests.models.harness import prompt_ids, runner_over, tiny_config

FAMILIES = sorted(name for name, family in FUSED.items() if not family.mixer)
DTYPES = [torch.float32, torch.bfloat16]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
VARIED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES),
    *((name, {"tie_word_embeddings": True}) for name in FAMILIES),
    *(
        (name, {FUSED[name].attention_bias: True})
        for name in FAMILIES
        if FUSED[name].attention_bias
    ),
    *((name, {FUSED[name].mlp_bias: True}) for name in FAMILIES if FUSED[name].mlp_bias),
    ("LlamaForCausalLM", {"head_dim": 8}),
    ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    ("Qwen3ForCausalLM", {"rope_parameters": YARN}),
    ("Gemma3ForCausalLM", {"rope_parameters": BY_TYPE}),
    ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 100}),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}),
]
MARKED = [
    pytest.param(
        name,
        fields,
        id=f"{name}-{'-'.join(map(str, fields))}",
        marks=long_unless(name in MECHANISMS.values() or (name, fields) in VARIED[-6:]),
    )
    for name, fields in VARIED
]
varied = pytest.mark.parametrize(("architecture", "fields"), MARKED)


def written(directory: Path, architecture: str, **fields: Any) -> Path:
    """A tiny model in float32, tied if its config says so, whose every number is drawn."""
    config = tiny_config(architecture, **fields)
    module = getattr(transformers, architecture)(config)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=draw)
    module.save_pretrained(directory)
    return directory


def skeleton(path: Path, dtype: torch.dtype) -> DecoderSkeleton | None:
    config = load_module_config(path)
    return skeleton_of(config, str(fused_class(config)), read_weight_map(path).map_tensors(), dtype)


def load_module_config(path: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(path)


def same(left: Any, right: Any, dtype: torch.dtype) -> bool:
    """Are two parts of recipes alike, to the last bit and fact?"""
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name), dtype) for name in names
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(
            same(a, b, dtype) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, nn.Linear | nn.Embedding):
        sizes = ("in_features", "out_features", "num_embeddings")
        assert all(getattr(left, n, None) == getattr(right, n, None) for n in sizes)
        return same(left.weight.data.to(dtype), right.weight.data.to(dtype), dtype) and same(
            getattr(left, "bias", None), getattr(right, "bias", None), dtype
        )
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    return bool(left == right)


@varied
def test_plain_configs_say_what_transformers_says(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Descriptions and modules follow alike from what the file says alone, where it says all."""
    path = written(tmp_path, architecture, **fields)
    plain, whole = plain_config(path), load_module_config(path)
    if "factor" in str(fields):
        assert plain is None
        return
    assert plain is not None
    assert describe(plain, 2) == describe(whole, 2)
    assert fused_class(plain) == fused_class(whole) == architecture
    tensors = read_weight_map(path).map_tensors()
    made = [skeleton_of(one, architecture, tensors, torch.float32) for one in (plain, whole)]
    left, right = (recipe_of(one, describe(whole, 4)) for one in made)
    assert left is not None
    assert same(left, right, torch.float32)


def is_not_taken(path: Path, field: str) -> bool:
    try:
        return plain_config(path) is None
    except ChangeSomething as refused:
        return field in str(refused)


@pytest.mark.parametrize("architecture", families(FAMILIES))
def test_a_config_that_leaves_anything_out_is_transformers_to_read(
    architecture: str, tmp_path: Path
) -> None:
    path = written(tmp_path, architecture)
    said = json.loads((path / CONFIG_FILE).read_text())
    family = FUSED[architecture]
    needed = [*NEEDED, *family.fields, family.activation, "rope_parameters", "architectures"]
    for field in needed:
        rest = {name: value for name, value in said.items() if name != field}
        (path / CONFIG_FILE).write_text(json.dumps(rest))
        assert plain_config(path) is None, field
    wrong: dict[str, Any] = {"num_hidden_layers": "many", "rms_norm_eps": "1e-5"}
    wrong |= {field: {} for field in UNUSUAL}
    for field, value in wrong.items():
        (path / CONFIG_FILE).write_text(json.dumps(said | {field: value}))
        assert is_not_taken(path, field), field


@covering({"architecture,fields": MARKED, "dtype": DTYPES}, together=1)
def test_recipes_are_those_of_transformers_modules(
    architecture: str, fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    path = written(tmp_path, architecture, **fields)
    theirs = load_module(
        read_weight_map(path), load_module_config(path), dtype, torch.device("cpu")
    )
    mine = skeleton(path, dtype)
    assert mine is not None
    description = describe_as(theirs.config, dtype, dtype)
    recipes = recipe_of(mine, description), recipe_of(theirs, description)
    assert None not in recipes
    assert same(*recipes, dtype)
    tied = [
        one.embedding.weight.data_ptr() == one.head.weight.data_ptr()
        for one in recipes
        if one is not None
    ]
    assert tied[0] == tied[1] == bool(theirs.config.tie_word_embeddings)
    names = [{name for name, _ in one.named_parameters()} for one in (mine, theirs)]
    assert names[0] == names[1]


def test_the_comparison_sees_every_part(tmp_path: Path) -> None:
    """Numbers, norms, rotations and facts of one layer that differ are seen."""
    path = written(tmp_path, "Gemma2ForCausalLM")
    whole = [skeleton(path, torch.float32) for _ in range(2)]
    description = describe_as(whole[0].config, torch.float32, torch.float32)  # type: ignore[union-attr]
    left, right = (recipe_of(one, description) for one in whole)
    assert left is not None and right is not None
    assert same(left, right, torch.float32)
    layer = right.layers[1]
    changed = (
        dataclasses.replace(layer, scale=layer.scale * 2),
        dataclasses.replace(layer, softcap=1.0),
        dataclasses.replace(layer, norms=(*layer.norms[:-1], None)),
        dataclasses.replace(layer, down_proj=layer.out_proj),
    )
    for other in changed:
        layers = (right.layers[0], other, *right.layers[2:])
        with pytest.raises(AssertionError):
            assert same(left, dataclasses.replace(right, layers=layers), torch.float32)


@pytest.mark.parametrize("architecture", sorted(FUSED))
def test_classes_are_those_that_transformers_runs(architecture: str) -> None:
    config = tiny_config(architecture)
    assert fused_class(config) == class_run(config) == architecture


def test_what_names_another_class_or_has_quantised_weights_takes_a_closer_look() -> None:
    config = tiny_config("LlamaForCausalLM")
    config.architectures = None
    assert fused_class(config) == "LlamaForCausalLM"
    config.architectures = ["LlamaForSequenceClassification"]
    assert fused_class(config) is None
    config.architectures, config.quantization_config = ["LlamaForCausalLM"], {"quant_method": "awq"}
    assert fused_class(config) is None
    assert fused_class(tiny_config("MambaForCausalLM")) is None


class TestUnusual:
    """Files or configs that are not as the family's: transformers' modules then."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return written(tmp_path, "LlamaForCausalLM")

    def rewrite(self, path: Path, **changes: torch.Tensor | None) -> None:
        tensors = load_file(path / SINGLE_FILE)
        for name, tensor in changes.items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        save_file(tensors, path / SINGLE_FILE, {"format": "pt"})

    @pytest.mark.parametrize(
        ("name", "tensor"),
        [
            ("model.norm.weight", None),
            ("model.layers.1.mlp.up_proj.weight", torch.zeros(3, 4)),
            ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)),
            ("model.layers.0.self_attn.q_norm.weight", torch.zeros(16)),
        ],
    )
    def test_tensors(self, path: Path, name: str, tensor: torch.Tensor | None) -> None:
        assert skeleton(path, torch.float32) is not None
        self.rewrite(path, **{name: tensor})
        assert skeleton(path, torch.float32) is None

    def test_a_head_of_its_own_beside_a_tied_one(self, tmp_path: Path) -> None:
        path = written(tmp_path / "tied", "LlamaForCausalLM", tie_word_embeddings=True)
        self.rewrite(path, **{"lm_head.weight": torch.ones(509, 48)})
        assert skeleton(path, torch.float32) is None

    @pytest.mark.parametrize(
        "fields",
        [
            {"hidden_act": "relu"},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ],
    )
    def test_fields(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        path = written(tmp_path / "other", "LlamaForCausalLM", **fields)
        assert skeleton(path, torch.float32) is None

    def test_states(self, tmp_path: Path) -> None:
        path = written(tmp_path / "states", "FalconH1ForCausalLM")
        assert skeleton(path, torch.float32) is None


def logits_of(
    path: Path, dtype: torch.dtype, quantization: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the model from its files, and by a fused pass over transformers' modules."""
    kernels: AttentionKernels = native.NativeKernels(1)
    mine = load_paged_model(path, kernels, dtype, quantization=quantization)
    assert isinstance(mine.module, DecoderSkeleton)
    theirs = load_module(
        read_weight_map(path), load_module_config(path), dtype, torch.device("cpu")
    )
    other = fused_model(theirs, quantization=quantization)
    assert mine.weight_bytes == other.weight_bytes
    ids = prompt_ids(30)
    return runner_over(mine).step([("a", ids)]), runner_over(other).step([("a", ids)])


@covering(
    {
        "architecture": families(FAMILIES),
        "dtype": DTYPES,
        "quantization": ["none", "int8", "int4"],
    }
)
def test_answers_are_the_same_bits(
    architecture: str, dtype: torch.dtype, quantization: str, tmp_path: Path
) -> None:
    mine, theirs = logits_of(written(tmp_path, architecture), dtype, quantization)
    assert torch.equal(mine, theirs)
    assert len(set(mine.argmax(-1).tolist())) > 3


def test_half_precision_files_are_read_too(tmp_path: Path) -> None:
    path = written(tmp_path, "LlamaForCausalLM")
    tensors = {name: tensor.half() for name, tensor in load_file(path / SINGLE_FILE).items()}
    save_file(tensors, path / SINGLE_FILE, {"format": "pt"})
    mine, theirs = logits_of(path, torch.bfloat16, "none")
    assert torch.equal(mine, theirs)


def test_other_kernels_take_transformers_modules(tmp_path: Path) -> None:
    path = written(tmp_path, "LlamaForCausalLM")
    model = load_paged_model(path, PortableKernels())
    assert type(model.module) is transformers.LlamaForCausalLM
