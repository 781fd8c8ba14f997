"""Flags of vLLM, SGLang and llama.cpp, and what Kvell does with each.

The command line, :class:`kvell.LLM`, :class:`kvell.AsyncEngine` and ``docs/equivalents.md`` use
these entries.  An entry is honoured (translated to flags of Kvell), accepted (Kvell does it
anyway), or refused; the latter two say why.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType

from kvell.equivalents.entry import Equivalent, Words, refusal
from kvell.equivalents.translations import (
    DRAFT_METHODS,
    GRAMMAR_BACKENDS,
    at_most,
    chunk,
    context,
    draft_words,
    gibibytes,
    instances,
    rename,
    structured_words,
    switches,
)

MOST_LOGPROBS = 20
"""The most log probabilities at a token that a request may ask for."""
_REFUSED: frozenset[str] = frozenset()
_ONE = frozenset({"1"})
_NO_TENSOR_PARALLELISM = (
    "Kvell has no tensor parallelism; use --instances mixed=2 for two copies of the model"
)
_NO_ADAPTERS = "Kvell serves no adapters; merge the adapter into the model, and serve that"
_OFFLOADING = "translated to --cpu-buffer, the host memory for pages that are not in the pool"

_FRONT = (
    Equivalent(("--uvicorn-log-level",), "there is no uvicorn; --log-requests logs each request"),
    Equivalent(
        ("--disable-fastapi-docs",),
        "translated to --disable-docs",
        takes_value=False,
        translate=switches("--disable-docs"),
    ),
    Equivalent(
        ("--disable-frontend-multiprocessing",),
        "instances are processes of their own in any case",
        takes_value=False,
    ),
    Equivalent(
        ("--enable-request-id-headers",),
        "each answer has its id in its body, and in the header x-request-id",
        takes_value=False,
    ),
    Equivalent(
        ("--enable-prompt-tokens-details",),
        "usage always has prompt_tokens_details",
        takes_value=False,
    ),
    Equivalent(
        ("--enable-server-load-tracking",),
        "the load is always served at /metrics",
        takes_value=False,
    ),
    Equivalent(
        ("--enable-force-include-usage",),
        "a stream has usage where its request asks for it; send "
        'stream_options {"include_usage": true}',
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--return-tokens-as-token-ids",),
        "tokens are not written as token_id:N; send return_token_ids in a request",
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--response-role",),
        "answers are the assistant's; leave it out",
        accepts=frozenset({"assistant"}),
    ),
    Equivalent(
        ("--max-logprobs",),
        f"requests may have {MOST_LOGPROBS} log probabilities at a token",
        translate=at_most("--max-logprobs", MOST_LOGPROBS),
    ),
    Equivalent(
        ("--logprobs-mode",),
        "log probabilities are the model's own, before penalties; leave it out",
        accepts=frozenset({"raw_logprobs"}),
    ),
    Equivalent(
        ("--api-server-count", "-asc"),
        "one process serves HTTP; use --cluster for several machines, each with a front",
        accepts=_ONE,
    ),
    Equivalent(
        ("--override-generation-config",),
        "default sampling is the model's generation_config.json; send the fields in requests, or "
        "change that file",
        accepts=frozenset({"{}"}),
        is_json=True,
    ),
    Equivalent(
        (
            "--middleware",
            "--tool-parser-plugin",
            "--reasoning-parser-plugin",
            "--logits-processors",
        ),
        "a server runs no code of others; put a proxy before it",
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--trust-request-chat-template",),
        "a request has no chat template; use --chat-template",
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(("--max-log-len",), "--log-requests logs no texts"),
    Equivalent(
        ("--log-config-file", "--uds"),
        "a server logs to stderr and listens at --host and --port; use --log-format",
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--stream-interval",),
        "pieces are sent as soon as they are ready; leave it out",
        accepts=_ONE,
    ),
)
"""Flags of vLLM's HTTP server."""
_MODEL = (
    Equivalent(
        ("--attention-backend", "--attention-config", "-ac"),
        "the kernels follow from the device and the model",
        is_json=True,
    ),
    Equivalent(
        ("--limit-mm-per-prompt",),
        "pictures of a request are bounded by their pixels, not by their number",
        is_json=True,
    ),
    Equivalent(
        ("--mm-processor-kwargs", "--media-io-kwargs"),
        "images are read one way; leave it out",
        accepts=frozenset({"{}"}),
        is_json=True,
    ),
    Equivalent(
        ("--mm-processor-cache-gb", "--mm-encoder-tp-mode", "--mm-processor-cache-type"),
        "tensors of pictures are kept while a request needs them",
    ),
    Equivalent(
        ("--skip-mm-profiling", "--disable-mm-preprocessor-cache"),
        "memory of pictures is in the contract, and nothing is profiled",
        takes_value=False,
    ),
    Equivalent(
        ("--model-impl",),
        "the implementation follows from the model; use --enforce-eager for transformers' layers",
        accepts=frozenset({"auto", "transformers"}),
    ),
    Equivalent(
        ("--convert",),
        "a model answers and embeds as it is; leave it out",
        accepts=frozenset({"auto", "none", "embed"}),
    ),
    Equivalent(
        ("--pooler-config", "--override-pooler-config"),
        "a vector is that of the last token, of length one; leave it out",
        accepts=frozenset({"{}"}),
        is_json=True,
    ),
    Equivalent(
        ("--config-format",),
        "config.json of transformers is read; leave it out",
        accepts=frozenset({"auto", "hf"}),
    ),
    Equivalent(
        ("--hf-config-path", "--hf-token"),
        "files are those of the model's directory or the hub's cache; use --hf-overrides, and set "
        "HF_TOKEN for the hub",
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--model-loader-extra-config",),
        "safetensors files are read one way; leave it out",
        accepts=frozenset({"{}"}),
        is_json=True,
    ),
    Equivalent(
        (
            "--max-seq-len-to-capture",
            "--cuda-graph-sizes",
            "--cudagraph-capture-sizes",
            "--max-cudagraph-capture-size",
            "--kernel-config",
            "--performance-mode",
        ),
        "decode steps of all sizes are recorded",
    ),
    Equivalent(
        (
            "--safetensors-load-strategy",
            "--max-parallel-loading-workers",
            "--ignore-patterns",
            "--tokenizer-pool-size",
            "--prefix-caching-hash-algo",
            "--gdn-prefill-backend",
            "--renderer-num-workers",
        ),
        "Kvell has one way for it",
    ),
    Equivalent(
        (
            "--use-tqdm-on-load",
            "--disable-cascade-attn",
            "--disable-custom-all-reduce",
            "--use-v2-block-manager",
            "--calculate-kv-scales",
            "--multi-step-stream-outputs",
        ),
        "Kvell has one way for it",
        takes_value=False,
    ),
    Equivalent(
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--num-scheduler-steps"),
        "chunks of prompts are shared by load; use --max-num-batched-tokens",
        accepts=_ONE,
    ),
    Equivalent(
        ("--long-prefill-token-threshold", "--num-lookahead-slots"),
        "chunks of prompts are shared by load; use --max-num-batched-tokens",
        accepts=frozenset({"0"}),
    ),
    Equivalent(
        ("--disable-hybrid-kv-cache-manager",),
        "each kind of layer has its own pages; use --manager paged to compare",
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--enable-sleep-mode",),
        "memory is kept while a server runs; use kvell cluster drain to end instances",
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--disable-sliding-window", "--enable-prompt-embeds", "--enable-return-routed-experts"),
        "Kvell has nothing like it; leave it out",
        takes_value=False,
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--nnodes", "-n"),
        "machines are joined by Ray; use --cluster ADDRESS",
        accepts=_ONE,
    ),
    Equivalent(
        ("--node-rank", "--master-addr", "--master-port", "--data-parallel-address"),
        "machines are joined by Ray; use --cluster ADDRESS",
        accepts=_REFUSED,
    ),
    Equivalent(
        ("--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp"),
        "instances lend each other memory for long requests; use --instances mixed=2",
        accepts=_ONE,
    ),
)
"""Flags of vLLM's engine."""

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
        is_json=True,
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
    Equivalent(
        ("--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras", "--lora-dtype"),
        _NO_ADAPTERS,
        accepts=_REFUSED,
    ),
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
        "one compiler of grammars serves all; backends: "
        + ", ".join(GRAMMAR_BACKENDS)
        + "; reasoning_parser is translated to --reasoning-parser",
        translate=structured_words,
        is_json=True,
    ),
    Equivalent(
        ("--compilation-config", "--optimization-level", "-O", "-cc"),
        "a step is compiled ahead, and no option selects how",
        is_json=True,
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
    *_FRONT,
    *_MODEL,
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
    Equivalent(("-m",), "translated to --model", translate=rename("--model"), system="llama.cpp"),
    Equivalent(
        ("--hf-repo", "-hf", "-hfr"),
        "Kvell reads safetensors, not GGUF; use --model with the hub id of the model's safetensors",
        accepts=_REFUSED,
        system="llama.cpp",
    ),
    Equivalent(
        ("--alias", "-a"),
        "translated to --served-model-name",
        translate=rename("--served-model-name"),
        system="llama.cpp",
    ),
    Equivalent(
        ("--ctx-size", "-c"),
        "translated to --max-model-len; 0 is the model's own context",
        translate=context,
        system="llama.cpp",
    ),
    Equivalent(
        ("--n-gpu-layers", "--gpu-layers", "-ngl"),
        "all layers of a model are on one device; use --device cuda for a GPU, and leave it out",
        accepts=frozenset({"0"}),
        system="llama.cpp",
    ),
    Equivalent(
        ("--parallel", "-np"),
        "translated to --max-num-seqs",
        translate=rename("--max-num-seqs"),
        system="llama.cpp",
    ),
    Equivalent(
        ("--batch-size", "-b"),
        "translated to --max-num-batched-tokens",
        translate=rename("--max-num-batched-tokens"),
        system="llama.cpp",
    ),
    Equivalent(
        ("-t",), "translated to --threads", translate=rename("--threads"), system="llama.cpp"
    ),
    Equivalent(
        ("--n-predict", "--predict"),
        "translated to --max-tokens",
        translate=rename("--max-tokens"),
        system="llama.cpp",
    ),
    Equivalent(
        ("--temp",),
        "translated to --temperature",
        translate=rename("--temperature"),
        system="llama.cpp",
    ),
    Equivalent(
        ("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"),
        "keys and values have one dtype; use --kv-cache-dtype fp8 or int8",
        accepts=frozenset({"bf16"}),
        system="llama.cpp",
    ),
    Equivalent(
        ("--cont-batching", "-cb"),
        "requests are always batched continuously",
        takes_value=False,
        system="llama.cpp",
    ),
    Equivalent(
        ("--jinja",), "chat templates are always Jinja's", takes_value=False, system="llama.cpp"
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
    if entry.is_json and entry.translate and isinstance(value, Mapping):
        return entry.translate(json.dumps(dict(value))), ""
    return entry.words(str(value) if entry.takes_value else ""), entry.note


def words_of(words: Words) -> list[str]:
    return [word for pair in words for word in pair if word is not None]
