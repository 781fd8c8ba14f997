"""Command lines of load tools that others wrote.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Route = Literal["chat", "completions", "responses"]
PATHS: dict[Route, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
"""Where each route of OpenAI's API is."""
OtherName = Literal["guidellm", "aiperf", "vllm"]
"""The tools."""


@dataclass(frozen=True)
class Shape:
    """The load: ``rate`` requests a second, evenly spaced.

    :param streams: if given, so many requests are kept in flight instead, and the rate is unused.
    """

    requests: int
    rate: float
    prompt_tokens: int
    output_tokens: int
    streams: int | None = None

    @property
    def pace(self) -> str:
        """How requests follow one another, for people."""
        return f"{self.streams} at once" if self.streams else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Asked:
    """One run of a tool.

    :param tokenizer: a directory; it makes the prompts.
    :param found: the report that the tool shall write.
    """

    base_url: str
    model: str
    tokenizer: Path
    route: Route
    shape: Shape
    seed: int
    found: Path


def guidellm_words(asked: Asked) -> list[str]:
    """Words behind ``guidellm``."""
    shape = asked.shape
    lengths = f"prompt_tokens={shape.prompt_tokens},output_tokens={shape.output_tokens}"
    backend = f"kind=openai_http,target={asked.base_url},model={asked.model}"
    options = {
        "--backend": f"{backend},request_format={PATHS[asked.route]}",
        "--profile": (
            f"kind=concurrent,streams={shape.streams}"
            if shape.streams
            else f"kind=constant,rate={shape.rate:g}"
        ),
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
    backends = {"chat": "openai-chat", "completions": "openai", "responses": "openai-responses"}
    paced = {
        "--request-rate": shape.rate,
        "--burstiness": 1e6,  # of gamma-distributed gaps: all but constant
    }
    options = {
        "--backend": backends[asked.route],
        "--base-url": asked.base_url,
        "--endpoint": PATHS[asked.route],
        "--model": asked.model,
        "--tokenizer": asked.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": shape.prompt_tokens,
        "--random-output-len": shape.output_tokens,
        "--num-prompts": shape.requests,
        **({"--max-concurrency": shape.streams} if shape.streams else paced),
        "--seed": asked.seed,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--result-dir": asked.found.parent,
        "--result-filename": asked.found.name,
    }
    return ["--ignore-eos", "--save-result", "--disable-tqdm", *_flat(options)]


def aiperf_words(asked: Asked) -> list[str]:
    """Words behind ``aiperf``.

    It takes the server's count of tokens where it finds it.  Of a response it looks for it in
    ``response.completed`` only, and an answer that its limit ends has ``response.incomplete``.
    """
    shape, flags = asked.shape, ["--streaming", "--no-gpu-telemetry"]
    if asked.route != "responses":
        flags.append("--use-server-token-count")
    if asked.route == "chat":
        flags.append("--per-chunk-usage")
    paced = {"--request-rate": shape.rate, "--request-rate-mode": "constant"}
    options = {
        "--model": asked.model,
        "--url": asked.base_url,
        "--endpoint-type": asked.route,
        "--tokenizer": asked.tokenizer,
        "--synthetic-input-tokens-mean": shape.prompt_tokens,
        "--synthetic-input-tokens-stddev": 0,
        "--output-tokens-mean": shape.output_tokens,
        "--output-tokens-stddev": 0,
        "--extra-inputs": "ignore_eos:true",
        "--request-count": shape.requests,
        **({"--concurrency": shape.streams} if shape.streams else paced),
        "--random-seed": asked.seed,
        "--ui": "none",
        "--artifact-dir": asked.found.parent,
    }
    return ["profile", *flags, *_flat(options)]


def _flat(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]
