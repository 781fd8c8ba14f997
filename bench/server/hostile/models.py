"""Models that hostile clients ask: one whose logits are not numbers, one that takes pictures."""

from pathlib import Path

import torch


def poisoned_model(tokenizer_of: Path, folder: Path) -> Path:
    """Write a small Llama whose last norm is NaN, with another model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture_model(folder: Path) -> Path:
    """Write a tiny Llama 3.2 Vision with random weights and a processor."""
    from tests.llm.pictures import save_processor
    from tests.models.pictures import CROSS, picture_module

    module = picture_module(CROSS)
    module.save_pretrained(folder)
    save_processor(folder, module.config)
    return folder
