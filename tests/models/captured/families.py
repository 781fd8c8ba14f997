"""Models whose steps are captured."""

FAMILIES = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "FalconH1ForCausalLM",
    "Qwen3NextForCausalLM",
)
