FAMILIES = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "FalconH1ForCausalLM",
    "Qwen3NextForCausalLM",
)
