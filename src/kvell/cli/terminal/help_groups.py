"""The groups of options in help texts, and the options that ``--help`` lists."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import click

OTHER = "Options"
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Prompt and answer": tuple(
            (
                "--prompt --prompts --system --raw --sequential --stop --max-tokens "
                "--temperature --top-k --top-p --ignore-eos --json"
            ).split()
        ),
        "Trace and arrivals": tuple(
            (
                "--trace --block-tokens --limit --repeat --rate --hints --arrivals "
                "--ignore-sessions --requests-out --timeline"
            ).split()
        ),
        "Model": tuple(
            (
                "--model --tokenizer --load-format --dtype --quantization --hf-overrides "
                "--device --seed --chat-template --chat-template-content-format "
                "--special-tokens-in-text --generation-config --tool-call-parser "
                "--reasoning-parser --config"
            ).split()
        ),
        "Memory": tuple(
            (
                "--kv-memory --memory --cpu-buffer --kv-cache-dtype --kv-budget "
                "--gpu-memory-utilization --enable-prefix-caching --max-model-len --common-pool "
                "--embeddings --eviction"
            ).split()
        ),
        "Batching": (
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--enable-chunked-prefill",
            "--slo-ttft",
            "--slo-tpot",
        ),
        "Speed": tuple(
            (
                "--num-speculative-tokens --speculative-model --prompt-lookup-max "
                "--prompt-lookup-min --async-scheduling --enforce-eager --threads --acceptance "
                "--hardware --any-machine"
            ).split()
        ),
        "Instances and cluster": tuple(
            (
                "--instances --routing --pd-caching --adaptive-roles --relief --calibration "
                "--no-calibration --page-transport --cluster --cluster-name --link "
                "--link-bandwidth"
            ).split()
        ),
        "HTTP and keys": tuple(
            (
                "--host --port --api-key --api-key-file --max-in-flight-per-key --guard-metrics "
                "--served-model-name --root-path --allowed-hosts --allowed-origins "
                "--allowed-methods --allowed-headers --allow-credentials --max-connections "
                "--keep-alive-seconds --enable-tokenizer-info-endpoint --disable-docs"
            ).split()
        ),
        "Observability": (
            "--log-requests",
            "--log-format",
            "--stats-seconds",
            "--otlp-traces-endpoint",
            "--kv-events-config",
        ),
        "Comparison": ("--manager",),
    }
)
"""Options by group, in the order of help."""
FIRST = frozenset(
    (
        "--model --dtype --quantization --kv-memory --memory --cpu-buffer --max-model-len "
        "--max-num-seqs --num-speculative-tokens --instances --host --port --api-key "
        "--served-model-name --config --help --prompt --prompts --system --max-tokens "
        "--temperature --trace --log-requests --help-all --hardware --rate --arrivals --out"
    ).split()
)
"""Options that ``--help`` lists; ``--help-all`` lists all."""
EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "serve": "kvell serve smollm2 --port 8000 --kv-memory 1GiB --max-num-seqs 64",
        "generate": 'kvell generate smollm2 "What is a page?" --max-tokens 48',
        "chat": "kvell chat smollm2 --temperature 0",
        "replay": "kvell replay llama3-8b --trace chat --kv-memory 16GiB",
        "plan": "kvell plan llama3-8b --kv-memory 16GiB",
        "calibrate": "kvell calibrate smollm2 --quick",
    }
)
_PLACES = {flag: n for n, flag in enumerate(flag for flags in GROUPS.values() for flag in flags)}
_GROUP_BY_FLAG = {flag: group for group, flags in GROUPS.items() for flag in flags}


def group_of(names: Iterable[str]) -> str:
    return next((_GROUP_BY_FLAG[name] for name in names if name in _GROUP_BY_FLAG), OTHER)


def place_of(parameter: click.Parameter) -> int:
    return min((_PLACES.get(name, len(_PLACES)) for name in parameter.opts), default=0)


def in_order(groups: Iterable[str]) -> Sequence[str]:
    """Return groups in the order of help; other options come last."""
    order = [*GROUPS, OTHER]
    return sorted(groups, key=order.index)
