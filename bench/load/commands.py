"""Command lines of load tools that others wrote.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PATH = "/v1/completions"
OtherName = Literal["guidellm", "vllm"]
"""The tools."""


@dataclass(frozen=True)
class Shape:
    """The load: ``rate`` requests a second, evenly spaced."""

    requests: int
    rate: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Asked:
    """One run of a tool.

    :param tokenizer: a directory; it makes the prompts.
    :param found: the report that the tool shall write.
    """

    base_url: str
    model: str
    tokenizer: Path
    shape: Shape
    seed: int
    found: Path


def guidellm_words(asked: Asked) -> list[str]:
    """Words behind ``guidellm``."""
    shape = asked.shape
    lengths = f"prompt_tokens={shape.prompt_tokens},output_tokens={shape.output_tokens}"
    backend = f"kind=openai_http,target={asked.base_url},model={asked.model}"
    options = {
        "--backend": f"{backend},request_format={PATH}",
        "--profile": f"kind=constant,rate={shape.rate:g}",
        "--constraint": f"kind=max_requests,count={shape.requests}",
        "--tokenizer": f"kind=hf_auto,model={asked.tokenizer}",
        "--data": f"kind=synthetic_text,{lengths}",
        "--seed": f"kind=static,value={asked.seed}",
        "--output": f"kind=json,path={asked.found}",
    }
    return ["run", "--disable-console", *_flat(options)]


def vllm_words(asked: Asked) -> list[str]:
    """Words behind ``vllm bench serve``."""
    shape = asked.shape
    options = {
        "--backend": "openai",
        "--base-url": asked.base_url,
        "--endpoint": PATH,
        "--model": asked.model,
        "--tokenizer": asked.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": shape.prompt_tokens,
        "--random-output-len": shape.output_tokens,
        "--num-prompts": shape.requests,
        "--request-rate": shape.rate,
        "--burstiness": 1e6,  # of gamma-distributed gaps: all but constant
        "--seed": asked.seed,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--result-dir": asked.found.parent,
        "--result-filename": asked.found.name,
    }
    return ["--ignore-eos", "--save-result", "--disable-tqdm", *_flat(options)]


def _flat(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]
