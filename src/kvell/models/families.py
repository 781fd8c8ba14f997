"""Which architectures may run through the attention hook, and why the others may not.

This is the only file that names model families.  A family is listed as exact
once ``tests/models`` compares it with transformers; anything else is refused at
start, because a wrong family does not fail, it answers wrongly.
"""

from kvell.errors import ChangeSomething

EXACT = frozenset(
    {
        "ArceeForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MinistralForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""Architectures whose paged forward pass is tested against transformers' own."""

RECURRENT = "needs its own mixer: state leaks between flattened requests"
CHUNKED = "needs a chunked attention group: its mask lives outside the attention function"
LATENT = "needs a latent cache: its keys and values are compressed"
CROSS = "needs cross-attention groups: its text attends to images or an encoder"

REFUSED = {
    "BambaForCausalLM": RECURRENT,
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "FalconH1ForCausalLM": RECURRENT,
    "FalconMambaForCausalLM": RECURRENT,
    "GraniteMoeHybridForCausalLM": RECURRENT,
    "JambaForCausalLM": RECURRENT,
    "KimiLinearForCausalLM": RECURRENT,
    "Lfm2ForCausalLM": RECURRENT,
    "Lfm2MoeForCausalLM": RECURRENT,
    "Llama4ForCausalLM": CHUNKED,
    "Llama4ForConditionalGeneration": CHUNKED,
    "Mamba2ForCausalLM": RECURRENT,
    "MambaForCausalLM": RECURRENT,
    "MiniMaxForCausalLM": RECURRENT,
    "MllamaForCausalLM": CROSS,
    "MllamaForConditionalGeneration": CROSS,
    "NemotronHForCausalLM": RECURRENT,
    "OlmoHybridForCausalLM": RECURRENT,
    "Qwen3NextForCausalLM": RECURRENT,
    "Qwen3_5ForCausalLM": RECURRENT,
    "Qwen3_5ForConditionalGeneration": RECURRENT,
    "RecurrentGemmaForCausalLM": RECURRENT,
    "RwkvForCausalLM": RECURRENT,
    "Zamba2ForCausalLM": RECURRENT,
    "ZambaForCausalLM": RECURRENT,
}
"""Architectures known to be wrong through the hook, and what serving them takes."""

UNKNOWN = "is not among the architectures tested to be exact"


def require_exact(architecture: str) -> None:
    """Let an architecture through only if its paged forward pass is known to be exact.

    :raises ChangeSomething: naming the architecture and what it would need.
    """
    if architecture in EXACT:
        return
    raise ChangeSomething(
        "model",
        architecture,
        REFUSED.get(architecture, UNKNOWN),
        "use a model with plain full or sliding attention, such as Llama, Qwen 3 or Gemma 3",
    )
