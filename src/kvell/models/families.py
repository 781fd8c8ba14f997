"""Which architectures may run through the attention hook, and why the others may not.

This is the only file that names model families.  A family is listed as exact
once ``tests/models`` compares it with transformers; anything else is refused at
start, because a wrong family does not fail, it answers wrongly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvell.errors import ChangeSomething
from kvell.models.image_families import ImageKind
from kvell.models.mixers import MixerKind

EXACT = frozenset(
    {
        "ArceeForCausalLM",
        "BambaForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Exaone4ForCausalLM",
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3nForCausalLM",
        "Gemma4ForCausalLM",
        "GemmaForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "JambaForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Llama4ForCausalLM",
        "LlamaForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniMaxForCausalLM",
        "MinistralForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronHForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoHybridForCausalLM",
        "ParallelHeadsForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
        "YoutuForCausalLM",
        "Zamba2ForCausalLM",
    }
)
"""Architectures whose paged forward pass is tested against transformers' own."""


@dataclass(frozen=True)
class LeanFamily:
    """What the modules of a family with a lean pass do not say of themselves.

    :param norm_offset: added to the weights of its norms.
    :param caps_scores: is ``attn_logit_softcapping`` of its attention heeded?
    :param mlp: what a layer calls its MLP; ``before_mlp`` the norm before it.
    :param final_norm: what the body calls the norm before the head.
    :param mixer: what a layer calls its state mixer beside attention; empty if it has none.
    """

    norm_offset: float = 0.0
    caps_scores: bool = False
    mlp: str = "mlp"
    before_mlp: str = "post_attention_layernorm"
    final_norm: str = "norm"
    mixer: str = ""


LEAN: Mapping[str, LeanFamily] = MappingProxyType(
    {
        "FalconH1ForCausalLM": LeanFamily(
            mlp="feed_forward",
            before_mlp="pre_ff_layernorm",
            final_norm="final_layernorm",
            mixer="mamba",
        ),
        "Gemma2ForCausalLM": LeanFamily(norm_offset=1.0, caps_scores=True),
        "Gemma3ForCausalLM": LeanFamily(norm_offset=1.0),
        "GemmaForCausalLM": LeanFamily(norm_offset=1.0),
        "LlamaForCausalLM": LeanFamily(),
        "MinistralForCausalLM": LeanFamily(),
        "MistralForCausalLM": LeanFamily(),
        "Qwen2ForCausalLM": LeanFamily(),
        "Qwen3ForCausalLM": LeanFamily(),
        "SmolLM3ForCausalLM": LeanFamily(),
    }
)
"""Decoders whose modules are those of a recipe (``lean/recipe``)."""

OWN_CLASSES: Mapping[str, str] = MappingProxyType({"parallel_heads": "ParallelHeadsForCausalLM"})
"""Classes that transformers has not, by model type; it learns them from us."""

WITH_IMAGES: Mapping[str, ImageKind] = MappingProxyType(
    {
        "InternVLForConditionalGeneration": "pieces",
        "LlavaOnevisionForConditionalGeneration": "patches",
        "MllamaForConditionalGeneration": "cross",
        "PaliGemmaForConditionalGeneration": "prefix",
        "Qwen2VLForConditionalGeneration": "grids",
        "Qwen2_5_VLForConditionalGeneration": "grids",
    }
)
"""Architectures of images and text, tested likewise, and how they take their images; their
text is that of an architecture in ``EXACT``, or has modules of its own (``OWN_TEXT``)."""

OWN_TEXT: frozenset[ImageKind] = frozenset({"cross", "grids"})
"""Kinds whose text attends to images across, or has positions of rows and columns."""

CROSS_MODULES = frozenset({"MllamaTextCrossAttention"})
"""Modules of transformers that attend to images across."""

RECURRENT = "needs its own mixer: state leaks between flattened requests"
INDEX = "needs an index cache: it chooses the tokens that it reads"
CROSS = "needs cross-attention groups: its text attends to images or an encoder"
IMAGES = "needs an encoder of images: only its text could be served"
AUDIO = "needs an encoder of audio: only its text could be served"

REFUSED = {
    "BartForConditionalGeneration": CROSS,
    "DeepseekV32ForCausalLM": INDEX,
    "Gemma3ForConditionalGeneration": IMAGES,
    "Gemma3nForConditionalGeneration": IMAGES,
    "Idefics3ForConditionalGeneration": IMAGES,
    "Llama4ForConditionalGeneration": IMAGES,
    "LlavaForConditionalGeneration": IMAGES,
    "LlavaNextForConditionalGeneration": IMAGES,
    "Mistral3ForConditionalGeneration": IMAGES,
    "MllamaForCausalLM": CROSS,
    "Qwen3VLForConditionalGeneration": IMAGES,
    "Qwen3VLMoeForConditionalGeneration": IMAGES,
    "Qwen3_5ForConditionalGeneration": IMAGES,
    "Qwen3_5MoeForConditionalGeneration": IMAGES,
    "RecurrentGemmaForCausalLM": RECURRENT,
    "RwkvForCausalLM": RECURRENT,
    "SmolVLMForConditionalGeneration": IMAGES,
    "T5ForConditionalGeneration": CROSS,
    "WhisperForConditionalGeneration": CROSS,
    "ZambaForCausalLM": RECURRENT,
    "xLSTMForCausalLM": RECURRENT,
}
"""Architectures known to be wrong through the hook, and what serving them takes."""

MIXER_KINDS: Mapping[str, MixerKind] = MappingProxyType(
    {
        "BambaMixer": "scalar-decay",
        "FalconH1Mixer": "scalar-decay",
        "FalconMambaMixer": "selective",
        "GraniteMoeHybridMambaLayer": "scalar-decay",
        "JambaMambaMixer": "selective",
        "KimiLinearDeltaAttention": "channel-delta",
        "Lfm2MoeShortConv": "convolution",
        "Lfm2ShortConv": "convolution",
        "Mamba2Mixer": "scalar-decay",
        "MambaMixer": "selective",
        "MiniMaxLightningAttention": "lightning",
        "NemotronHMamba2Mixer": "scalar-decay",
        "Qwen3_5GatedDeltaNet": "gated-delta",
        "Qwen3_5MoeGatedDeltaNet": "gated-delta",
        "OlmoHybridGatedDeltaNet": "gated-delta",
        "Qwen3NextGatedDeltaNet": "gated-delta",
        "Zamba2MambaMixer": "scalar-decay",
    }
)
"""Modules of transformers that keep a state, and the mixer of ours that takes their place."""

UNKNOWN = "is not among the architectures tested to be exact: it needs a test of its own"


def require_exact(architecture: str, need: str = UNKNOWN) -> None:
    """Let an architecture through only if its paged forward pass is known to be exact.

    :param need: said of an architecture that nobody looked at.
    :raises ChangeSomething: naming the architecture and what it would need.
    """
    if architecture in EXACT or architecture in WITH_IMAGES:
        return
    raise ChangeSomething(
        "model",
        architecture,
        REFUSED.get(architecture, need),
        "use a model with plain full or sliding attention, such as Llama, Qwen 3 or Gemma 3",
    )
