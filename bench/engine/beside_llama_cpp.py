"""Tokens per second of one GGUF file in Kvell and in llama.cpp, in turn.

``python -m bench.engine.beside_llama_cpp --llama-env DIR``

``DIR`` is a virtual environment with llama-cpp-python, built on this machine. Without ``--file``,
llama.cpp quantises the packaged model again, to Q4_K_M.  Each round starts both systems anew, so
this file also runs in the other environment, where Kvell is missing: it imports neither above.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

BATCHES = (1, 8)
PROMPT_TOKENS = 16
ANSWER_TOKENS = 96
LONG_TOKENS = 2048
CONTEXT_TOKENS = 4096
THREADS = 2
Q4_K_M = 15
"""llama.cpp's number of the type."""

Figures = dict[str, float]
Decode = Callable[[int, int, int], float]
"""Returns the seconds of answers: how many, and the tokens of each prompt and of each answer."""


def prompts(count: int, length: int) -> list[list[int]]:
    return [
        [(17 + 31 * (at + 7 * one)) % 40_000 + 100 for at in range(length)] for one in range(count)
    ]


def figures(decode: Decode) -> Figures:
    """Return tokens per second: of answers by batch, and of a long prompt."""
    decode(1, PROMPT_TOKENS, 8)
    made = {}
    for count in BATCHES:
        seconds = decode(count, PROMPT_TOKENS, ANSWER_TOKENS) - decode(count, PROMPT_TOKENS, 1)
        made[f"batch {count}"] = count * (ANSWER_TOKENS - 1) / seconds
    made["prompt"] = LONG_TOKENS / decode(1, LONG_TOKENS, 1)
    return made


def measure_kvell(file: str) -> Figures:
    from kvell.engine.protocol.sampling_params import SamplingParams
    from kvell.llm import LLM

    llm = LLM(file, kv_memory="512MiB", enable_prefix_caching=False)

    def decode(count: int, length: int, answer: int) -> float:
        asked = [{"prompt_token_ids": ids} for ids in prompts(count, length)]
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        began_seconds = time.perf_counter()
        outputs = llm.generate(asked, params)
        seconds = time.perf_counter() - began_seconds
        assert all(len(output.token_ids) == answer for output in outputs)
        return seconds

    return figures(decode)


def measure_llama(file: str) -> Figures:
    numpy, llama = import_module("numpy"), import_module("llama_cpp")
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = CONTEXT_TOKENS, LONG_TOKENS, max(BATCHES)
    params.kv_unified = True  # all sequences share the context
    params.n_threads = params.n_threads_batch = THREADS
    context = llama.llama_init_from_model(model, params)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(LONG_TOKENS, 0, 1)

    def compute(rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows of token, position, sequence, and whether its next token is asked."""
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, is_asked) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, is_asked
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        assert llama.llama_decode(context, batch) == 0
        asked = [at for at, row in enumerate(rows) if row[3]]
        logits = [llama.llama_get_logits_ith(context, at) for at in asked]
        return [int(numpy.ctypeslib.as_array(one, (vocabulary,)).argmax()) for one in logits]

    def decode(count: int, length: int, answer: int) -> float:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        began_seconds = time.perf_counter()
        tokens = compute(
            [
                (token, position, sequence, position == length - 1)
                for sequence, ids in enumerate(prompts(count, length))
                for position, token in enumerate(ids)
            ]
        )
        for position in range(length, length + answer - 1):
            tokens = compute([(token, position, at, True) for at, token in enumerate(tokens)])
        return time.perf_counter() - began_seconds

    return figures(decode)


def quantise(source: str, target: str) -> None:
    llama = import_module("llama_cpp")
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = Q4_K_M, True, THREADS
    assert llama.llama_model_quantize(source.encode(), target.encode(), params) == 0


def run(python: Path, *arguments: str) -> Any:
    """Run a part of this file in an environment; return what it prints, as JSON."""
    command = [str(python), __file__, *arguments]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    """Print medians and ratios, and write the bench's result file."""
    from bench import result_file
    from kvell.models.sources.packaged import gguf_file

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-env", type=Path, required=True)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    other = args.llama_env / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        file = args.file or Path(folder) / "smollm2-Q4_K_M.gguf"
        if args.file is None:
            run(other, "quantise", str(gguf_file()), str(file))
        rounds = [
            (run(Path(sys.executable), "kvell", str(file)), run(other, "llama", str(file)))
            for _ in range(args.rounds)
        ]
    made = {}
    for name in rounds[0][0]:
        ratios = [ours[name] / theirs[name] for ours, theirs in rounds]
        ours, theirs = (median(pair[at][name] for pair in rounds) for at in (0, 1))
        made[name] = {"kvell": ours, "llama.cpp": theirs, "ratios": ratios}
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name}: {ours:,.0f} / {theirs:,.0f} tokens/s = {median(ratios):.2f} ({spread})")
    result_file.write(args.json or result_file.path_of("beside_llama_cpp"), made)


if __name__ == "__main__":
    parts = {"kvell": measure_kvell, "llama": measure_llama, "quantise": quantise}
    if sys.argv[1:2] and sys.argv[1] in parts:
        print(json.dumps(parts[sys.argv[1]](*sys.argv[2:])))  # type: ignore[operator]
    else:
        main()
