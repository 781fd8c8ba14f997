"""Models, with the flags under which each system serves them, or why it does not."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.cost.shapes import NAMES, model_path
from kvell.models.sources.packaged import gguf_file
from kvell.models.sources.source import resolve_model


@dataclass(frozen=True)
class Case:
    """One model.

    :param name: a shape of ``bench.cost.shapes``, or what ``--model`` takes.
    :param four_bits: whether weights are the packaged blocks of four bits.
    :param kvell: flags of ``kvell serve``; ``vllm`` has those of vLLM's server.
    :param unasked: systems that are not started, with the reason.
    """

    name: str
    model: str
    four_bits: bool = False
    kvell: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    unasked: Mapping[str, str] = field(default_factory=dict)

    def directory(self, cache_dir: Path) -> Path:
        """The model's; random weights are written once."""
        if self.model in NAMES:
            return model_path(self.model, cache_dir, cache_dir / "bench")
        return resolve_model(self.model, cache_dir)


CASES: Mapping[str, Case] = {
    "smollm2": Case("smollm2", "smollm2"),
    "smollm2-int4": Case(
        "smollm2-int4",
        "smollm2",
        four_bits=True,
        kvell=("--quantization", "int4"),
        unasked={"transformers": "unpacks 4-bit blocks when it loads them: its bfloat16 row"},
    ),
    "gemma-3-270m": Case("gemma-3-270m", "gemma-3-270m"),
    # vLLM keeps states of prefixes only for some hybrids: off, as random prompts leave Kvell's.
    "falcon-h1-small": Case(
        "falcon-h1-small", "falcon-h1-small", vllm=("--no-enable-prefix-caching",)
    ),
}
"""What ``--models`` names; any other name is what ``--model`` takes."""


def cases_of(names: Sequence[str]) -> list[Case]:
    """The cases of these names, in order."""
    return [CASES.get(name) or Case(name, name) for name in names]


def vllm_source(case: Case, exported: Path) -> tuple[str, tuple[str, ...]]:
    """The model that vLLM serves, and its flags.

    :param exported: the model in bfloat16, whose tokenizer and config a file of blocks lacks.
    """
    if not case.four_bits:
        return str(exported), case.vllm
    return str(gguf_file()), (
        *("--tokenizer", str(exported), "--hf-config-path", str(exported)),
        *("--load-format", "gguf", "--quantization", "gguf"),
        *case.vllm,
    )


SAID = ("Error: ", "Exception: ", "error: ")
"""Marks of an error message within a line."""
PATHS = re.compile(r"(?:/[\w.+-]+)+/([\w.+-]+)")


def reason_of(words: str) -> str:
    """The line of a system's last output that says why it ended; the last line if none does.

    Files are named without their directories.
    """
    shown = PATHS.sub(r"\1", words)
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    telling = [line for line in lines if any(mark in line for mark in SAID)]
    chosen = (telling or lines or ["it said nothing"])[-1]
    starts = [chosen.find(mark) for mark in SAID if mark in chosen]
    return chosen[min(starts) + chosen[min(starts) :].find(": ") + 2 :] if starts else chosen
