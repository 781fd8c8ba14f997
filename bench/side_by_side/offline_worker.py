"""An offline system as a process: it reads a line of prompts and writes a line with its time.

``python -m bench.side_by_side.offline_worker ENGINE MODEL``; lines are JSON.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import json
import sys
import time
from pathlib import Path

import torch

from bench.engine.throughput import (
    System,
    continuous_batching_system,
    kvell_system,
    load_module,
    transformers_system,
)
from kvell.vocabulary import MIB

KV_BYTES = 512 * MIB


def made(engine: str, model: str) -> System:
    """The system of that name, loaded.

    :raises SystemExit: if there is no such system.
    """
    if engine == "kvell":
        return kvell_system(model, "bfloat16", Path(model).parent, KV_BYTES)
    module = load_module(Path(model), torch.bfloat16)
    if engine == "transformers":
        return transformers_system(module)
    if engine == "generate-batch":
        return continuous_batching_system(module)
    raise SystemExit(f"no engine {engine}")


def main() -> None:
    """Answer until stdin ends."""
    run = made(sys.argv[1], sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.perf_counter()
        tokens = run(asked["prompts"], asked["max_tokens"])
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "output_tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
