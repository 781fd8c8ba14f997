"""Tiny models of images and text, prompts with pictures, and transformers' word on both."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import Embeddings, GroupKind, Manager
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_families import ImageKind
from kvell.models.images.image_store import ImageStore
from kvell.models.loading.loading import describe_as
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.models.harness import MIXED, SMALL, prompt_ids
from tests.models.served import MAX_MODEL_LEN, Answer, Recorder, Served

PATCHES = "LlavaOnevisionForConditionalGeneration"
CROSS = "MllamaForConditionalGeneration"
PREFIX = "PaliGemmaForConditionalGeneration"
PIECES = "InternVLForConditionalGeneration"
GRIDS, GRIDS_2_5 = "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
EVERY = (PATCHES, CROSS, PREFIX, PIECES, GRIDS, GRIDS_2_5)
FAST = (GRIDS, CROSS, PREFIX)
"""A family for each mechanism: images in the text, beside it, and read in both directions."""
IN_TEXT = (PATCHES, PIECES, GRIDS, GRIDS_2_5)
"""Images are runs of tokens of the text, which is read in one direction."""
KINDS: dict[str, ImageKind] = {
    PATCHES: "patches",
    CROSS: "cross",
    PREFIX: "prefix",
    PIECES: "pieces",
    GRIDS: "grids",
    GRIDS_2_5: "grids",
}
PLACEHOLDER, END = 505, 506
"""Below the vocabulary's end; prompts of random tokens leave them out."""
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
    "num_channels": 3,
}
TILES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "max_num_tiles": 4,
    "intermediate_layers_indices": [0, 1],
    "vision_output_dim": 96,
}
MERGED, PATCH = 2, 4
GRID_TEXT: dict[str, Any] = {
    **{name: size for name, size in SMALL.items() if name != "head_dim"},
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
}
GRID_VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "temporal_patch_size": 2,
}
Tensors = Mapping[str, torch.Tensor]


def picture_config(architecture: str) -> Any:
    head: dict[str, Any] = {"architectures": [architecture], "tie_word_embeddings": False}
    if architecture == PATCHES:
        text = {"model_type": "qwen2", **SMALL}
        vision = {"model_type": "siglip_vision_model", **SIGLIP}
        grid = [[24, 24], [24, 48], [48, 24], [48, 48]]
        return transformers.LlavaOnevisionConfig(
            text_config=text,
            vision_config=vision,
            image_grid_pinpoints=grid,
            image_token_index=PLACEHOLDER,
            **head,
        )
    if architecture == PREFIX:
        text = {"model_type": "gemma2", **SMALL, **MIXED, "query_pre_attn_scalar": 24}
        vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **SIGLIP}
        vision["projection_dim"] = SMALL["hidden_size"]
        return transformers.PaliGemmaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=PLACEHOLDER,
            projection_dim=SMALL["hidden_size"],
            **head,
        )
    if architecture == PIECES:
        text = {"model_type": "qwen2", **SMALL}
        vision = {**SIGLIP, "image_size": [32, 32], "patch_size": [8, 8]}
        return transformers.InternVLConfig(
            text_config=text, vision_config=vision, image_token_id=PLACEHOLDER, **head
        )
    if architecture in (GRIDS, GRIDS_2_5):
        named = {"image_token_id": PLACEHOLDER, "vision_end_token_id": END, **head}
        sizes = {"text_config": GRID_TEXT, "vision_config": _grid_vision(architecture)}
        is_first = architecture == GRIDS
        config = transformers.Qwen2VLConfig if is_first else transformers.Qwen2_5_VLConfig
        return config(**copy.deepcopy(sizes), **named)
    layers = {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "hidden_size": 64}
    text = {"model_type": "mllama_text_model", **SMALL, **layers}
    vision = {"model_type": "mllama_vision_model", **TILES}
    # Its placeholder is the first id after the vocabulary, which its embeddings know.
    return transformers.MllamaConfig(
        text_config=text, vision_config=vision, image_token_index=SMALL["vocab_size"], **head
    )


def _grid_vision(architecture: str) -> dict[str, Any]:
    """Windows of 16 pixels: of 2 × 2 tokens, smaller than most pictures."""
    if architecture == GRIDS:
        return {**GRID_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    return {**GRID_VISION, **sizes, "window_size": 16, "fullatt_block_indexes": [1]}


@cache
def picture_module(architecture: str, longest: int = SMALL["max_position_embeddings"]) -> Any:
    """Random weights whose outputs vary; transformers' own eager attention.

    :param longest: tokens of the longest text.
    """
    config = picture_config(architecture)
    config.get_text_config().max_position_embeddings = longest
    module = random_module(config, seed=3)
    module.set_attn_implementation("eager")
    return module


def placeholder_of(architecture: str) -> int:
    return SMALL["vocab_size"] if architecture == CROSS else PLACEHOLDER


@dataclass(frozen=True)
class Prompt:
    """Token ids and tensors as a model's processor gives them."""

    token_ids: list[int]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def text(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them a placeholder."""
    return [3 + token % 500 for token in prompt_ids(length, seed)]


def pixels(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pictured(architecture: str, *parts: Sequence[int] | int) -> Prompt:
    """A prompt of texts (lists of tokens) and pictures (seeds of their pixels)."""
    seeds = [part for part in parts if isinstance(part, int)]
    tensors = _TENSORS[architecture](seeds) if seeds else {}
    counts = iter(_counts(architecture, tensors))
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids += [placeholder_of(architecture)] * next(counts) + _after(architecture)
        else:
            ids += part
    return Prompt(ids, tensors)


def _after(architecture: str) -> list[int]:
    """Where rows and columns are positions, transformers must see where a picture ends."""
    return [END] if architecture in (GRIDS, GRIDS_2_5) else []


TOKENS = {PREFIX: 9, PIECES: 4}
"""Of a picture, where all have as many and more than one."""


def _counts(architecture: str, tensors: Tensors) -> list[int]:
    """Placeholders of each picture; of some that are not square in LLaVA-OneVision."""
    if "image_grid_thw" in tensors:
        return [int(grid.prod()) // MERGED**2 for grid in tensors["image_grid_thw"]]
    if architecture != PATCHES:
        first = next(iter(tensors.values()), torch.empty(0))
        return [TOKENS.get(architecture, 1)] * max(len(first), 9)
    if not tensors:
        return []
    alone = len(tensors["image_sizes"]) == 1
    return [alone_tokens(size.tolist()) if alone else 10 for size in tensors["image_sizes"]]


def alone_tokens(size: Sequence[int]) -> int:
    """9 of the whole picture, and rows of the unpadded grid with a new line after each."""
    height, width = size
    grid = 6 if height > 24 else 3, 6 if width > 24 else 3
    if width / height > grid[1] / grid[0]:
        padding = (grid[0] - round(height * grid[1] / width, 7)) // 2
        grid = grid[0] - int(2 * padding), grid[1]
    elif width / height < grid[1] / grid[0]:
        padding = (grid[1] - round(width * grid[0] / height, 7)) // 2
        grid = grid[0], grid[1] - int(2 * padding)
    return 9 + grid[0] * (grid[1] + 1)


SIZES = ([48, 40], [24, 48], [40, 24], [48, 48], [20, 22])
"""Heights and widths that pictures have, by their seed."""


def _patches(seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    sizes = torch.tensor([SIZES[seed % len(SIZES)] for seed in seeds])
    return {
        "pixel_values": torch.stack([pixels(seed, 5, 3, 24, 24) for seed in seeds]),
        "image_sizes": sizes,
    }


def _whole(seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.stack([pixels(seed, 3, 24, 24) for seed in seeds])}


def _pieces(seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    """Pictures of one piece; two side by side are as one of two."""
    return {"pixel_values": torch.stack([pixels(seed, 3, 32, 32) for seed in seeds])}


RATIOS = ((1, 1), (2, 2), (7, 3), (6, 4))
"""(aspect ratio id, tiles that are not padding)"""


def _tiled(seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    ratios = [RATIOS[seed % len(RATIOS)] for seed in seeds]
    masks = [[int(tile < tiles) for tile in range(4)] for _, tiles in ratios]
    return {
        "pixel_values": torch.stack([pixels(seed, 4, 3, 16, 16) for seed in seeds])[None],
        "aspect_ratio_ids": torch.tensor([[ratio for ratio, _ in ratios]]),
        "aspect_ratio_mask": torch.tensor([masks]),
    }


GRID_SIZES = ((4, 6), (4, 4), (8, 2), (6, 8), (2, 2))
"""Heights and widths that pictures have, in patches, by their seed."""


def _grids(seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    sizes = [GRID_SIZES[seed % len(GRID_SIZES)] for seed in seeds]
    numbers = 3 * 2 * PATCH**2
    patches = zip(seeds, sizes, strict=True)
    return {
        "pixel_values": torch.cat([pixels(seed, h * w, numbers) for seed, (h, w) in patches]),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in sizes]),
    }


_TENSORS = {
    PATCHES: _patches,
    PREFIX: _whole,
    CROSS: _tiled,
    PIECES: _pieces,
    GRIDS: _grids,
    GRIDS_2_5: _grids,
}


@torch.inference_mode()
def oracle(architecture: str, prompt: Prompt, output: Sequence[int] = ()) -> torch.Tensor:
    """transformers' own logits at every position of prompt and output, [tokens, vocab]."""
    module, ids = picture_module(architecture), torch.tensor([[*prompt.token_ids, *output]])
    named = dict(prompt.tensors)
    if named and architecture == CROSS:
        return _oracle_across(module, prompt, ids)
    if named and architecture == PREFIX:
        # Its processor says 0 for the prompt, and generation goes on with 1.
        named["token_type_ids"] = (torch.arange(ids.shape[1]) >= len(prompt.token_ids))[None].long()
    elif named and "image_grid_thw" in named:
        named["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    elif named and architecture == PATCHES:
        named["batch_num_images"] = torch.tensor([len(named["image_sizes"])])
    logits: torch.Tensor = module(input_ids=ids, use_cache=False, **named).logits[0]
    return logits


def _oracle_across(module: Any, prompt: Prompt, ids: torch.Tensor) -> torch.Tensor:
    """The text before a picture is computed before there is one, as in a conversation.

    In one call transformers would let that text attend to all pictures: it masks what such
    rows get from the MLP, but not what they get from attention.
    """
    starts = [i for i, token in enumerate(ids[0].tolist()) if token == placeholder_of(CROSS)]
    cuts = sorted({0, *starts, ids.shape[1]})
    cache, rows = transformers.DynamicCache(config=module.config), []
    for low, high in pairwise(cuts):
        named: dict[str, Any] = {}
        if low in starts:
            number = starts.index(low)
            named = {name: t[:, number : number + 1] for name, t in prompt.tensors.items()}
            mask = _who_sees(prompt, starts, number, high - low)
            named["cross_attention_mask"] = mask
        step = module(input_ids=ids[:, low:high], past_key_values=cache, use_cache=True, **named)
        rows.append(step.logits[0])
    return torch.cat(rows)


def _who_sees(prompt: Prompt, starts: Sequence[int], number: int, length: int) -> torch.Tensor:
    """As the model's processor says it: the last picture, and those right before it."""
    first = number
    while first and starts[first - 1] == starts[first] - 1:
        first -= 1
    tiles = prompt.tensors["aspect_ratio_mask"][:, : number + 1].clone()
    tiles[:, :first] = 0
    return tiles[:, None].expand(-1, length, -1, -1)


class ServedPictures(Served):
    """A whole engine over a tiny model of images and text."""

    def __init__(
        self,
        architecture: str,
        kv_bytes: int = 8 * MIB,
        batched: int = 256,
        max_model_len: int = MAX_MODEL_LEN,
        manager: Manager = "kvell",
        embeddings: Embeddings = "own",
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.architecture = architecture
        module = copy.deepcopy(picture_module(architecture))
        description = describe_as(module.config, torch.float32, kv_dtype)
        kernels = choose_kernels(torch.device("cpu"))
        self.recorder = Recorder(PagedModel(module, description, kernels, kv_dtype))
        options = EngineOptions(
            kv_memory_bytes=kv_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=batched,
            manager=manager,
            embeddings=embeddings,
        )
        self.engine = build_engine(self.recorder, architecture, options)  # type: ignore[arg-type]
        self.answers: dict[str, Answer] = {}
        self.prompts: dict[str, Prompt] = {}

    @property
    def store(self) -> ImageStore:
        store = self.recorder.model.images
        assert store is not None
        return store

    def say(self, name: str, prompt: Prompt, outputs: int = 8) -> ImagePrompt:
        told = ImagePrompt(np.asarray(prompt.token_ids, np.int32), ())
        if prompt.tensors:
            told = self.store.take(told.token_ids, prompt.tensors)
        self.prompts[name] = prompt
        self.answers[name] = Answer(prompt.token_ids)
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        ids = told.token_ids.astype("<i4").tobytes()
        command = Submit(RequestSpec(RequestId(name), ids, params, images=told.images))
        assert is_accepted(self.engine.handle(command))
        return told

    def asked(self, name: str, prompt: Prompt, outputs: int = 8) -> Answer:
        self.say(name, prompt, outputs)
        self.run()
        return self.answers[name]

    def group(self, kind: GroupKind) -> int:
        return next(i for i, group in enumerate(self.layout.groups) if group.kind is kind)

    def error(self, name: str) -> float:
        """Largest difference of logits, in parts of the largest logit."""
        answer, prompt = self.answers[name], self.prompts[name]
        expected = oracle(self.architecture, prompt, answer.output)[len(prompt.token_ids) - 1 : -1]
        return float((torch.stack(answer.logits) - expected).abs().max() / expected.abs().max())

    def check(self) -> None:
        """Every answer is what transformers says, and the answers vary."""
        for name, answer in self.answers.items():
            if answer.output:
                assert self.error(name) <= 1e-4, name
        outputs = [token for answer in self.answers.values() for token in answer.output]
        assert len(set(outputs)) > len(outputs) // 4, "answers that repeat themselves prove nothing"
