"""An environment that has vLLM's CPU build, and a model in the form that it serves."""

from pathlib import Path

import torch

from bench.managers.environment import FLAG, PYTHON, create, require
from kvell.errors import ChangeSomething


def vllm_python(directory: Path) -> Path:
    """The interpreter of an environment that has vLLM; made if there is none (3.5 GB).

    :raises ChangeSomething: if it cannot be installed.
    """
    if not directory.exists() or not any(directory.iterdir()):
        create(directory)
    elif not (directory / PYTHON).exists():
        problem, remedy = "is no environment", "name a directory that is empty or not there"
        raise ChangeSomething(FLAG, directory, problem, remedy)
    return require(directory) / PYTHON


def exported(source: Path, target: Path) -> Path:
    """Write the model in bfloat16 and its tokenizer to ``target``, once.

    vLLM would convert float32 weights at every start.
    """
    if (target / "tokenizer.json").exists():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    module.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target
