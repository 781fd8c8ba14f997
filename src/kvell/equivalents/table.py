"""Flags of vLLM and SGLang, and what Kvell does with each.

The command line, :class:`kvell.LLM`, :class:`kvell.AsyncEngine` and ``docs/equivalents.md`` use
these entries.  An entry is honoured (translated to flags of Kvell), accepted (Kvell does it
anyway), or refused; the latter two say why.
"""

from collections.abc import Mapping
from types import MappingProxyType

from kvell.equivalents.entry import Equivalent, Words, refusal
from kvell.equivalents.translations import (
    DRAFT_METHODS,
    chunk,
    draft_words,
    gibibytes,
    instances,
    rename,
    switches,
)

_REFUSED: frozenset[str] = frozenset()
_ONE = frozenset({"1"})
_NO_TENSOR_PARALLELISM = (
    "Kvell has no tensor parallelism; use --instances mixed=2 for two copies of the model"
)
_NO_ADAPTERS = "Kvell serves no adapters; merge the adapter into the model, and serve that"
_OFFLOADING = "translated to --cpu-buffer, the host memory for pages that are not in the pool"

EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        ("--kv-cache-memory-bytes", "--kv-cache-memory"),
        "translated to --kv-memory",
        translate=rename("--kv-memory"),
    ),
    Equivalent(
        ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
        _NO_TENSOR_PARALLELISM,
        accepts=_ONE,
    ),
    Equivalent(
        ("--pipeline-parallel-size", "-pp", "--pp-size"),
        "a model runs in one process; use --instances mixed=2 for two copies of the model",
        accepts=_ONE,
    ),
    Equivalent(
        ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
        "translated to --instances mixed=N",
        translate=instances,
    ),
    Equivalent(
        ("--enable-expert-parallel", "-ep"),
        "the experts of a model run in one process; leave it out",
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--distributed-executor-backend",),
        "instances are processes of this machine; use --cluster ADDRESS for machines of a Ray "
        "cluster",
        accepts=frozenset({"mp", "uni"}),
    ),
    Equivalent(
        ("--enable-auto-tool-choice",),
        "models may always call the tools that a request has",
        takes_value=False,
    ),
    Equivalent(
        ("--speculative-config", "-sc"),
        "translated to --num-speculative-tokens and --speculative-model; methods: "
        + ", ".join(DRAFT_METHODS),
        translate=draft_words,
    ),
    Equivalent(("--kv-offloading-size",), _OFFLOADING, translate=gibibytes("--kv-offloading-size")),
    Equivalent(
        ("--kv-offloading-backend",),
        "the CPU buffer is a part of Kvell; leave it out",
        accepts=frozenset({"native"}),
    ),
    Equivalent(("--swap-space",), _OFFLOADING, translate=gibibytes("--swap-space")),
    Equivalent(
        ("--cpu-offload-gb",),
        "weights stay on their device; use --quantization int8 or int4 for smaller weights",
        accepts=frozenset({"0", "0.0"}),
    ),
    Equivalent(
        ("--trust-remote-code",),
        "Kvell never runs code of a model's repository",
        takes_value=False,
    ),
    Equivalent(
        ("--block-size", "--page-size"),
        "each kind of layer has its own page size, which follows from the model",
    ),
    Equivalent(
        ("--num-gpu-blocks-override",),
        "the pool is sized in bytes; use --kv-memory 4GiB",
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--tokenizer-mode",),
        "the tokenizer follows from the model's files; leave it out",
        accepts=frozenset({"auto", "hf"}),
    ),
    Equivalent(
        ("--skip-tokenizer-init",),
        "a model without a tokenizer is served by token ids; leave it out",
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--runner", "--task"),
        "a model answers and embeds without a choice between them; leave it out",
        accepts=frozenset({"auto", "generate", "pooling", "embed", "embedding", "score"}),
    ),
    Equivalent(
        ("--revision", "--tokenizer-revision", "--code-revision"),
        "a hub id means its main revision; download the other one, and give its directory",
        accepts=frozenset({"main"}),
    ),
    Equivalent(
        ("--download-dir",),
        "models are downloaded to the hub's cache; set HF_HOME",
        accepts=_REFUSED,
    ),
    Equivalent(("--enable-lora",), _NO_ADAPTERS, takes_value=False, accepts=_REFUSED),
    Equivalent(("--lora-modules",), _NO_ADAPTERS, accepts=_REFUSED),
    Equivalent(
        ("--kv-transfer-config",),
        "instances of one server transfer pages themselves; use --instances prefill=1,decode=1",
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--scheduling-policy",),
        "requests with a priority run first, others in the order of their arrival; leave it out",
        accepts=frozenset({"fcfs", "priority"}),
    ),
    Equivalent(
        ("--guided-decoding-backend", "--structured-outputs-config"),
        "one compiler of grammars serves all schemas; leave it out",
        accepts=frozenset({"auto", "xgrammar"}),
    ),
    Equivalent(
        ("--compilation-config", "-O"), "a step is compiled ahead, and no option selects how"
    ),
    Equivalent(
        ("--disable-log-stats",),
        "translated to --stats-seconds 0",
        takes_value=False,
        translate=lambda _: (("--stats-seconds", "0"),),
        in_class="it logs no statistics",
    ),
    Equivalent(
        ("--enable-log-requests",),
        "translated to --log-requests",
        takes_value=False,
        translate=switches("--log-requests"),
    ),
    Equivalent(
        ("--disable-log-requests", "--no-enable-log-requests"),
        "requests are logged only with --log-requests",
        takes_value=False,
    ),
    Equivalent(
        ("--disable-uvicorn-access-log", "--disable-access-log"),
        "there is no access log; --log-requests logs each request when it ends",
        takes_value=False,
    ),
    Equivalent(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"),
        "Kvell serves HTTP without TLS; put a proxy with TLS before it",
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--model-path",),
        "translated to --model",
        translate=rename("--model"),
        system="SGLang",
    ),
    Equivalent(
        ("--context-length",),
        "translated to --max-model-len",
        translate=rename("--max-model-len"),
        system="SGLang",
    ),
    Equivalent(
        ("--max-running-requests",),
        "translated to --max-num-seqs",
        translate=rename("--max-num-seqs"),
        system="SGLang",
    ),
    Equivalent(
        ("--chunked-prefill-size",),
        "translated to --max-num-batched-tokens, or --no-enable-chunked-prefill for -1",
        translate=chunk,
        system="SGLang",
    ),
    Equivalent(
        ("--disable-radix-cache",),
        "translated to --no-enable-prefix-caching",
        takes_value=False,
        translate=switches("--no-enable-prefix-caching"),
        system="SGLang",
    ),
    Equivalent(
        ("--mem-fraction-static",),
        "translated to --gpu-memory-utilization",
        translate=rename("--gpu-memory-utilization"),
        system="SGLang",
    ),
    Equivalent(
        ("--enable-hierarchical-cache",),
        "the CPU buffer has a size; use --cpu-buffer 8GiB",
        takes_value=False,
        accepts=_REFUSED,
        system="SGLang",
    ),
    Equivalent(
        ("--enable-metrics",),
        "metrics are always served at /metrics",
        takes_value=False,
        system="SGLang",
    ),
)
_BY_NAME: Mapping[str, Equivalent] = MappingProxyType(
    {name: entry for entry in EQUIVALENTS for name in entry.names}
)

VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "--dtype": MappingProxyType({"float": "float32", "fp32": "float32", "bf16": "bfloat16"}),
        "--kv-cache-dtype": MappingProxyType({"fp8_e4m3": "fp8", "bf16": "bfloat16"}),
    }
)
"""Other systems' names of values, by flag, and Kvell's."""
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "--dtype": MappingProxyType(
            dict.fromkeys(
                ("half", "float16", "fp16"),
                "is not served; use bfloat16, which has the same size",
            )
        ),
        "--kv-cache-dtype": MappingProxyType(
            {"fp8_e5m2": "is not served; use fp8, which is e4m3 with a scale per token and head"}
        ),
        "--load-format": MappingProxyType(
            dict.fromkeys(
                ("pt", "gguf", "bitsandbytes", "tensorizer", "runai_streamer"),
                "is not read; give a directory with safetensors files",
            )
        ),
    }
)
"""Other systems' values that Kvell refuses, by flag, and why."""


def equivalent(flag: str) -> Equivalent | None:
    """Return the entry of a flag, ``--name`` or ``-n``; None if no entry has it."""
    return _BY_NAME.get(flag.replace("_", "-") if flag.startswith("--") else flag)


def kvell_value(flag: str, value: str) -> str:
    """Return Kvell's name of a flag's value.

    :raises ChangeSomething: if Kvell refuses the value.
    """
    if sentence := REFUSED_VALUES.get(flag, {}).get(value):
        raise refusal(flag, value, sentence)
    return VALUES.get(flag, {}).get(value, value)


def argument_words(name: str, value: object) -> tuple[Words, str] | None:
    """Return the flags of Kvell for an argument of vLLM's ``LLM``, and a note, or None.

    :param name: like ``gpu_memory_utilization``.
    :return: None if no entry has the name.
    :raises ChangeSomething: if the argument, or its value, is refused.
    """
    entry = equivalent(f"--{name}")
    if entry is None:
        return None
    if value is False and not entry.takes_value:
        return (), ""
    if entry.translate is draft_words and isinstance(value, Mapping):
        return draft_words(value), ""
    return entry.words(str(value) if entry.takes_value else ""), entry.note


def words_of(words: Words) -> list[str]:
    """Return flags and values as words of a command line."""
    return [word for pair in words for word in pair if word is not None]
