"""A command line with a fake model behind it."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.cli.main import run
from kvell.cli.terminal.session import Session
from kvell.clock import VirtualClock
from kvell.engine.opened import Pricing
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.mempool.rendezvous import FolderRendezvous
from kvell.models.sources.progress import Progress
from kvell.server.text.served_text import ServedText
from kvell.vocabulary import GIB


@dataclass(frozen=True)
class FakeResult:
    index: int
    prompt_token_ids: Any
    token_ids: Any
    text: str
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: str = "length"


class FakeContract:
    def lines(self) -> list[str]:
        return ["weights 1 MiB", "KV pool 2 MiB"]


class FakeTokenizer:
    """One token per character; a chat ends with the mark of the next speaker."""

    has_chat_template = True

    def encode(self, text: str) -> Any:
        return np.array([ord(char) for char in text], dtype=np.int32)

    def encode_chat(self, messages: Any) -> Any:
        said = "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)
        return self.encode(said + "<assistant>")


@dataclass
class FakeModel:
    """Answers with the prompt in capitals, one character at a time; keeps its prompts."""

    clock: VirtualClock
    settings: EngineSettings | None = None
    pricing: Pricing | None = None
    reads_text: bool = False
    contract: FakeContract = field(default_factory=FakeContract)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    asked: list[tuple[str, SamplingParams]] = field(default_factory=list)
    sequential: bool | None = None
    fails: BaseException | None = None
    closed_after: int | None = None

    def generate(self, prompts: Any, sampling: Any, sequential: bool = False) -> list[FakeResult]:
        self.sequential = sequential
        return [
            self._result(index, prompt, wanted)
            for index, (prompt, wanted) in enumerate(zip(prompts, sampling, strict=True))
        ]

    def _result(self, index: int, prompt: Any, sampling: SamplingParams) -> FakeResult:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self.asked.append((as_text(ids), sampling))
        answer = as_text(ids).upper()[: sampling.max_tokens]
        return FakeResult(index, ids, self.tokenizer.encode(answer), answer)

    def stream(self, prompt: Any, sampling: SamplingParams) -> Generator[str, None, str]:
        self.asked.append((as_text(prompt), sampling))
        sent = 0
        try:
            for char in as_text(prompt).upper()[: sampling.max_tokens]:
                self.clock.advance(0.5)
                yield char
                sent += 1
                if self.fails and sent == 2:
                    raise self.fails
        except GeneratorExit:
            self.closed_after = sent
            raise
        return "stop" if sent == len(as_text(prompt)) else "length"

    def stats(self) -> dict[str, Any]:
        return {"generation_seconds": 1.5, "max_running": np.int64(3)}


def as_text(token_ids: Any) -> str:
    return "".join(chr(token) for token in token_ids)


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


Kvell = Callable[..., Ended]


class Served:
    """A fake HTTP server: keeps its arguments, or fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None

    def __call__(
        self, command: Any, texts: Any, options: Any, announce: Any, show_contract: Any
    ) -> None:
        self.calls.append((command, texts, options))
        if self.fails:
            raise self.fails
        announce("http://127.0.0.1:8000")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    stand_in = Served()
    monkeypatch.setattr("kvell.server.run.serve", stand_in)
    monkeypatch.setattr(ServedText, "load", lambda name, path, *_: f"text of {name} in {path}")
    monkeypatch.setattr(
        "kvell.models.sources.source.resolve_model", lambda model, *_: Path(f"where {model} is")
    )
    monkeypatch.setattr("kvell.engine.unloaded.check_named", lambda *_: None)
    return stand_in


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(VirtualClock())


@pytest.fixture
def environ() -> dict[str, str]:
    return {}


@pytest.fixture
def kvell(
    model: FakeModel,
    environ: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Kvell:
    """Run a command line in this process with the fake model behind it."""

    def open_model(
        settings: EngineSettings,
        cache_dir: Path,
        progress: Progress,
        incarnation: int = 0,
        weights_fd: int | None = None,
        pool_place: FolderRendezvous | None = None,
        pricing: Pricing | None = None,
        *,
        reads_text: bool = False,
    ) -> FakeModel:
        assert cache_dir == tmp_path / "cache"
        progress("loading weights", 0.5)
        progress("loading weights", 1.0)
        model.settings, model.pricing = settings, pricing
        model.reads_text = reads_text
        return model

    def call(*args: str | Path) -> Ended:
        session = Session(
            cache_dir=tmp_path / "cache",
            available_bytes=lambda: 4 * GIB,
            open_model=open_model,
            clock=model.clock,
            environ=environ,
        )
        code = run([str(arg) for arg in args], session)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return call


@pytest.fixture
def tiny_config(tmp_path: Path) -> Path:
    """A config.json with 5 sliding layers for each full one."""
    path = tmp_path / "config.json"
    path.write_text(
        """{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 128, "vocab_size": 1000,
        "intermediate_size": 128, "max_position_embeddings": 4096, "dtype": "bfloat16",
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "sliding_attention", "full_attention"]}"""
    )
    return path
