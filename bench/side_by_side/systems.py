"""Systems that can be compared: servers behind OpenAI's API, and libraries without one."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from socket import create_server
from typing import Protocol

import numpy as np

from bench.side_by_side.driving import VOCAB_SIZE, drive, figures_of
from bench.side_by_side.processes import SystemFailed, SystemProcess
from bench.side_by_side.scenarios import Figures, Scenario
from kvell.errors import ChangeSomething

START_SECONDS = 600.0
FIRST_ID = 10


class System(Protocol):
    """A system that answers scenarios and is idle between them."""

    @property
    def process(self) -> SystemProcess:
        """The process that runs it."""
        ...

    def run(self, scenario: Scenario, seed: int) -> Figures | None:
        """Run a round; None if the system does not support the scenario."""
        ...


class ServerSystem:
    """A server, driven as ``kvell bench serve`` drives one."""

    def __init__(self, process: SystemProcess, base_url: str) -> None:
        self.process, self.base_url = process, base_url

    def run(self, scenario: Scenario, seed: int) -> Figures:
        """Run a round over HTTP."""
        return figures_of(drive(self.base_url, scenario, seed))


class OfflineSystem:
    """A library in a process of its own, called with whole batches."""

    def __init__(self, process: SystemProcess) -> None:
        self.process = process

    def run(self, scenario: Scenario, seed: int) -> Figures | None:
        """Run a round, timed by the process itself."""
        if not scenario.is_rectangular:
            return None
        draw = np.random.default_rng(seed)
        shape = (scenario.requests, scenario.prompt_tokens)
        prompts = draw.integers(FIRST_ID, VOCAB_SIZE, shape).tolist()
        asked = {"prompts": prompts, "max_tokens": scenario.output_tokens}
        self.process.say(json.dumps(asked))
        told = json.loads(self.process.hear())
        wanted = scenario.requests * scenario.output_tokens
        if told["output_tokens"] != wanted:
            raise SystemFailed(f"made {told['output_tokens']} tokens, not {wanted}")
        seconds = told["seconds"]
        return {
            "seconds": seconds,
            "output_tokens_per_second": wanted / seconds,
            "prompt_tokens_per_second": scenario.requests * scenario.prompt_tokens / seconds,
            "requests_per_second": scenario.requests / seconds,
        }


def kvell_server(
    model: str, log: Path, flags: Sequence[str], python: str = sys.executable
) -> ServerSystem:
    """Start ``kvell serve`` with further flags, on a free port.

    :param python: of an environment that has Kvell, perhaps another version.
    """
    command = [python, "-m", "kvell.cli.main", "serve", "--model", model]
    command += ["--dtype", "bfloat16", "--port", "0", "--json", *flags]
    process = SystemProcess(command, log, {}, talks=True)
    return ServerSystem(process, json.loads(process.hear())["url"])


def python_of(tree: str) -> str:
    """The interpreter of a source tree that ``make install`` was run in.

    :raises ChangeSomething: if it has none.
    """
    python = Path(tree, ".venv", "bin", "python").absolute()
    if not python.exists():
        raise ChangeSomething(
            "tree", tree, "it has no .venv/bin/python", "run `make install` there"
        )
    return str(python)


def vllm_server(python: Path, model: str, log: Path, flags: Sequence[str]) -> ServerSystem:
    """Start vLLM's CPU server in its own environment, on a free port.

    :raises SystemFailed: if it does not come up; it has been ended then.
    """
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", Path(model).name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "8192", *flags]
    process = SystemProcess(command, log, vllm_environment(python))
    try:
        process.wait_for(f"http://127.0.0.1:{port}/health", START_SECONDS)
    except SystemFailed:
        process.end()
        raise
    return ServerSystem(process, f"http://127.0.0.1:{port}")


def offline_system(engine: str, model: Path, log: Path) -> OfflineSystem:
    """Start ``engine`` of :mod:`bench.side_by_side.offline_worker`."""
    command = [sys.executable, "-m", "bench.side_by_side.offline_worker", engine, str(model)]
    process = SystemProcess(command, log, {}, talks=True)
    while process.hear().strip() != "ready":  # libraries may greet first
        pass
    return OfflineSystem(process)


def vllm_environment(python: Path) -> Mapping[str, str]:
    """Settings of vLLM's CPU backend: both cores, a bounded cache, one OpenMP runtime.

    Unless its own runtime is preloaded, it reserves a core.
    """
    runtime = python.parent.parent / "lib" / "libiomp5.so"
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "0,1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LD_PRELOAD": str(runtime),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port() -> int:
    """A free port."""
    with closing(create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])
