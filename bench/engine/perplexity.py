"""Perplexity of a fixed text, teacher-forced, with weights of fewer and fewer bits.

The text is in the repository: chapters I and II of Lewis Carroll's "Alice's Adventures in
Wonderland" (1865, in the public domain), from Project Gutenberg's eBook 11 without its header.
Every token but the first of a window is predicted from those before it in the window.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.engine.forward import Shape, batch_of
from kvell.attention.choice import choose_kernels
from kvell.memory import plan_layout
from kvell.models.config.quantization import QUANTIZATIONS
from kvell.models.loading.loading import load_paged_model
from kvell.models.paged_model import PagedModel
from kvell.models.sources.source import resolve_model
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import MIB

TEXT = Path(__file__).parent / "alice.txt"
POOL_BYTES = 64 * MIB


@dataclass(frozen=True)
class Quality:
    """One way to store weights.

    :param nats: mean surprise of a token.
    :param same_first: share of tokens whose likeliest prediction is that of float32.
    :param distance: mean absolute difference of a true token's log probability from float32's.
    """

    name: str
    weight_bytes: int
    perplexity: float
    nats: float
    same_first: float
    distance: float


def windows(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Whole windows [n, size] of a text's ids; the remainder at the end is dropped."""
    count = ids.numel() // size
    if not count:
        raise ValueError(f"the text's {ids.numel()} tokens do not fill a window of {size}")
    return ids[: count * size].view(count, size)


def log_probabilities(model: PagedModel, parts: torch.Tensor) -> torch.Tensor:
    """Log probabilities, float32 [windows, size − 1, vocab]; each window is one request."""
    layout = plan_layout(model.description.layers, POOL_BYTES)
    model.attach(layout, torch.zeros(layout.pool_bytes, dtype=torch.uint8))
    size = parts.shape[1]
    plain = batch_of(Shape(1, size, size), layout, seed=0)
    made = []
    for part in parts:
        batch = type(plain)(part, plain.positions, plain.groups, torch.arange(size - 1))
        made.append(model.forward(batch).log_softmax(-1))
    return torch.stack(made)


def quality(
    name: str, model: PagedModel, parts: torch.Tensor, exact: torch.Tensor | None
) -> tuple[Quality, torch.Tensor]:
    """Quality of one model against float32's predictions (its own if there are none yet)."""
    draft_tokens = log_probabilities(model, parts)
    exact = draft_tokens if exact is None else exact
    wanted = parts[:, 1:, None]
    true, theirs = draft_tokens.gather(-1, wanted), exact.gather(-1, wanted)
    nats = -float(true.double().mean())
    return (
        Quality(
            name,
            model.weight_bytes,
            math.exp(nats),
            nats,
            float((draft_tokens.argmax(-1) == exact.argmax(-1)).float().mean()),
            float((true - theirs).abs().mean()),
        ),
        exact,
    )


def show(found: Sequence[Quality], tokens: int) -> None:
    """Print a table."""
    table = Table(title=f"{tokens} tokens of {TEXT.name}")
    for column in ("weights", "MB", "perplexity", "same first guess", "mean |Δ log p|"):
        table.add_column(column, justify="right")
    for one in found:
        numbers = (f"{one.weight_bytes / 1e6:.0f}", f"{one.perplexity:.3f}")
        table.add_row(one.name, *numbers, f"{one.same_first:.1%}", f"{one.distance:.4f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    path = resolve_model(options.model, options.cache_dir)
    ids = Tokenizer.load(path).encode(options.text.read_text())
    parts = windows(torch.tensor(ids.tolist()), options.window)
    ways = [("float32", torch.float32, "none"), ("bfloat16", torch.bfloat16, "none")]
    ways += [(name, torch.bfloat16, name) for name in QUANTIZATIONS[1:]]
    kernels, exact, found = choose_kernels(torch.device("cpu")), None, []
    for name, dtype, quantization in ways:
        model = load_paged_model(path, kernels, dtype, quantization=quantization)
        one, exact = quality(name, model, parts, exact)
        found.append(one)
    show(found, parts.numel() - len(parts))
    if options.json:
        report = {"tokens": parts.numel() - len(parts), "ways": [asdict(one) for one in found]}
        result_file.write(options.json, report)


if __name__ == "__main__":
    main()
