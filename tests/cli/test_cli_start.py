"""What a start imports: only what a dense model with a fused pass needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kvell.models.fused._forward")

GENERATE = ("generate", "--prompt", "Hello", "--max-tokens", "1", "--kv-memory", "64MiB")
MODELLING = {
    "accelerate",
    "gguf",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
}
"""Modules that transformers' modelling code imports."""
HTTP = {"fastapi", "starlette", "uvicorn"}
TEXT = {"tokenizers", "transformers"}

SPY = """
import json, sys
from pathlib import Path

def keep():
    Path(sys.argv.pop()).write_text(json.dumps(sorted(sys.modules)))

command = sys.argv.pop(1)
exec(command)
keep()
"""

RUN = """
from kvell.cli.main import main
words, sys.argv = sys.argv, ["kvell", *sys.argv[1:-1]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
sys.argv = words
"""

ENGINE = """
from kvell.cli.terminal.session import open_model
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.cli.terminal.environment import process_cache_dir
from kvell.models.sources.progress import quiet
model = open_model(EngineSettings("smollm2", kv_memory_bytes=64 << 20), process_cache_dir(), quiet)
assert model.engine.ready().facts.max_model_len
"""

FRONT = """
import kvell.server.run
from kvell.server.text.named_texts import texts_of
from kvell.cli.terminal.environment import process_cache_dir
from kvell.models.sources.progress import quiet
assert texts_of(("smollm2",), process_cache_dir(), quiet).names == ["smollm2"]
"""


def imported(tmp_path: Path, cache_dir: Path, program: str, *words: str) -> set[str]:
    """Modules of a fresh process that has run a program."""
    kept = tmp_path / "modules.json"
    environment = os.environ | {"KVELL_CACHE_DIR": str(cache_dir), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SPY, program, *words, str(kept)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=300)
    return set(json.loads(kept.read_text()))


def test_generating_needs_no_modelling_code_and_no_http(tmp_path: Path, smollm2_path: Path) -> None:
    modules = imported(tmp_path, smollm2_path.parent, RUN, *GENERATE)
    assert not modules & (MODELLING | HTTP)
    assert modules >= {"torch", "tokenizers", "kvell.models.fused.skeleton"}


@pytest.mark.long
def test_an_instance_reads_no_text_and_needs_no_transformers(
    tmp_path: Path, smollm2_path: Path
) -> None:
    modules = imported(tmp_path, smollm2_path.parent, ENGINE)
    assert not {name for name in modules if name.split(".")[0] in TEXT - {"tokenizers"}}
    assert not modules & (MODELLING | HTTP)


def test_a_front_starts_its_instance_before_anything_slow(
    tmp_path: Path, smollm2_path: Path
) -> None:
    modules = imported(tmp_path, smollm2_path.parent, FRONT)
    assert not {name for name in modules if name.split(".")[0] in TEXT | HTTP | {"torch"}}


@pytest.mark.long
def test_a_pass_by_modules_brings_their_code(tmp_path: Path, smollm2_path: Path) -> None:
    """The other tests can fail: where the modules are needed, they are found."""
    eager = ENGINE.replace("open_model(", "lazily(").replace(
        "from kvell.models.sources.progress import quiet",
        "from kvell.models.sources.progress import quiet\n"
        "from kvell.llm import LLM\n"
        "lazily = lambda settings, cache, told: LLM(\n"
        "    settings.model, kv_memory_bytes=64 << 20, cache_dir=cache, enforce_eager=True)",
    )
    modules = imported(tmp_path, smollm2_path.parent, eager)
    assert modules >= {"transformers.modeling_utils", "transformers.models.llama.modeling_llama"}


def test_an_interrupt_during_imports_ends_it_quietly() -> None:
    script = """
import builtins, os, signal
from kvell.cli.start import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
real = builtins.__import__
def interrupted(name, *rest):
    if name == "kvell.cli.main":
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = interrupted
main()
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, b"")
