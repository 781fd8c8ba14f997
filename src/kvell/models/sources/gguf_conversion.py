"""Conversion of a GGUF file to a transformers directory, by transformers' own loader."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from kvell.models.sources.progress import Progress


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write config, float32 safetensors and tokenizer of a GGUF file into a new directory.

    The loader would keep the weights packed.  They are unpacked here, once, because
    plain float32 or bfloat16 matrices are served.
    """
    logging.disable_progress_bar()  # ours are shown instead
    progress("unpacking the packaged model (once)", 0.1)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    progress("writing weights", 0.8)
    model.save_pretrained(target)
    progress("writing the tokenizer", 0.9)
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    )
    tokenizer.save_pretrained(target)
    progress("done", 1.0)
